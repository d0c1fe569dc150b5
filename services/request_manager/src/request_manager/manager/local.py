"""The manager as the gateway's seam sees it, in the gateway's own process."""

import asyncio
from collections.abc import AsyncGenerator

from request_manager.contract import Generation, ModelCard, TokenDelta
from request_manager.manager.coordinator import Coordinator
from request_manager.manager.registry import Registry
from request_manager.manager.request import Outcome
from treecore.errors import Unavailable
from treecore.messages import Announcement


class LocalManager:
    """A contract.Manager over a Coordinator whose `run` is someone else's task."""

    def __init__(
        self, coordinator: Coordinator, registry: Registry, max_tree_nodes: int, max_pause_s: float = 600.0
    ) -> None:
        self._coordinator = coordinator
        self._registry = registry
        self._max_tree_nodes = max_tree_nodes
        self._max_pause_s = max_pause_s
        self._card: ModelCard | None = None

    def card(self) -> ModelCard:
        """See contract.Manager. A verifier that restarts does not take the card away."""
        usable = self._registry.verifiers()
        if usable:
            self._card = self._card_of(usable[0].announcement)
        if self._card is None:
            raise Unavailable("no verifier has announced itself yet")
        return self._card

    def _card_of(self, announcement: Announcement) -> ModelCard:
        capacity = announcement.blocks.total * announcement.blocks.block_len
        return ModelCard(
            announcement.name,
            announcement.vocab_size,
            min(announcement.context_len, capacity),
            announcement.eos_token_ids,
            self._max_tree_nodes,
            announcement.batch_invariant,
        )

    def is_ready(self) -> bool:
        """See contract.Manager."""
        return bool(self._registry.verifiers())

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta]:
        """See contract.Manager."""
        outbox = asyncio.Queue[Outcome]()
        request = self._coordinator.submit(generation, outbox)
        try:
            while request.finish_reason is None or not outbox.empty():
                outcome = await self._next(outbox)
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            if request.finish_reason is None:
                self._coordinator.cancel(request)

    async def _next(self, outbox: asyncio.Queue[Outcome]) -> Outcome:
        try:
            async with asyncio.timeout(self._max_pause_s):
                return await outbox.get()
        except TimeoutError:
            return Unavailable(f"no token for {self._max_pause_s:g} s")
