"""The verifier process: loads the LLM, or its part of it, announces itself, answers VerifyRequests.

Rank 0 of a group does that for all of them; the other ranks never speak NATS.
"""

import asyncio
import os
import secrets
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

from llm_verifier.engine import Engine
from llm_verifier.group.member import Follower, hardware, lead
from llm_verifier.group.pod import run_ranks
from llm_verifier.group.seat import Seat, find_seat
from llm_verifier.lease import Lease, Tenancy
from llm_verifier.settings import VerifierSettings
from treecore.errors import ConfigError
from treecore.grammar import grammar_starter
from treecore.messages import Announcement, VerifyRequest, WorkerId
from treecore.model.backend import Hardware, token_chooser, uses_triton
from treecore.model.choosing import ChooseTokens
from treecore.model.costs import measure_costs
from treecore.model.decoder import Decoder
from treecore.model.graphs import GraphedDecoder
from treecore.model.held import Forwards, HeldRequests, P
from treecore.model.load import load_decoder
from treecore.service.lifecycle import run_service
from treecore.service.operations import Operations, open_operations
from treecore.service.tasks import first_of
from treecore.service.worker import serve_worker


async def serve(settings: VerifierSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises ConfigError if the checkpoint cannot be loaded, or gives no numbers."""
    if settings.ranks_per_pod > 1 and settings.local_rank is None:
        command = (sys.executable, "-m", "llm_verifier", *sys.argv[1:])
        await run_ranks(settings.ranks_per_pod, command, os.environ, stop)
        return
    if settings.local_rank:  # the first of a pod's ranks speaks for all of them
        settings = settings.model_copy(update={"operations_port": None})
    async with open_operations(settings) as operations:
        await _serve_seat(find_seat(settings, os.environ, socket.gethostname()), settings, stop, operations)


async def _serve_seat(seat: Seat, settings: VerifierSettings, stop: asyncio.Event, operations: Operations) -> None:
    if seat.size == 1:
        on = hardware(settings, rank=0)
        decoder = await asyncio.to_thread(_load, settings, on)
        await _serve_steps(settings, decoder, stop, operations, token_chooser(on))
    elif settings.cuda_graphs:
        raise ConfigError("cuda_graphs: for a verifier of one rank")
    elif seat.rank == 0:
        await _lead(seat, settings, stop, operations)
    else:
        await _follow(seat, settings, stop, operations)


def _load(settings: VerifierSettings, on: Hardware) -> Decoder | GraphedDecoder:
    can_graph = on.device.startswith("cuda") and uses_triton(on) and on.offload == "none"
    if settings.cuda_graphs and not can_graph:
        raise ConfigError("cuda_graphs: needs device cuda, attention triton and no offload")
    decoder = load_decoder(settings.model, dtype=settings.dtype, on=on)
    return GraphedDecoder(decoder) if settings.cuda_graphs else decoder


async def _lead(seat: Seat, settings: VerifierSettings, stop: asyncio.Event, operations: Operations) -> None:
    loop = asyncio.get_running_loop()

    def stop_all() -> None:
        loop.call_soon_threadsafe(stop.set)

    with ExitStack() as stack:
        group = lead(seat, settings, stop.is_set, stop_all)
        await _serve_steps(settings, await asyncio.to_thread(stack.enter_context, group), stop, operations)


async def _follow(seat: Seat, settings: VerifierSettings, stop: asyncio.Event, operations: Operations) -> None:
    # At once: a StatefulSet replaces a group's next pod when this one is ready. Rank 0 says whether the group can work.
    operations.vitals.start(lambda: not stop.is_set())
    follower = Follower(seat, settings)

    async def leave_on_stop() -> None:
        await stop.wait()
        follower.leave()
        await asyncio.get_running_loop().create_future()  # the group ends, and with it `run`

    await first_of(asyncio.to_thread(follower.run), leave_on_stop())


async def _serve_steps(
    settings: VerifierSettings,
    decoder: Forwards[P],
    stop: asyncio.Event,
    operations: Operations,
    choose_tokens: ChooseTokens | None = None,
) -> None:
    spec = decoder.spec
    if spec.draft is not None and spec.draft.trimmed_head:
        raise ConfigError(f"{settings.model}: an SSM, whose head has only some of the tokens; it cannot verify")
    grammars = await asyncio.to_thread(grammar_starter, settings.model, spec.vocab_size, spec.eos_token_ids)
    num_blocks, reuses = settings.kv_tokens // settings.block_len, settings.prefix_cache
    held = HeldRequests(
        decoder, num_blocks, settings.block_len, grammars, reuses_prefixes=reuses, choose_tokens=choose_tokens
    )
    worker_id = WorkerId(f"verifier-{secrets.token_hex(4)}")
    costs = await asyncio.to_thread(measure_costs, held, str(settings.model))
    lease = Lease(time.monotonic)
    tenancy = Tenancy(Engine(worker_id, held, spec.vocab_size), held, lease)

    def describe(leaving: bool) -> Announcement:
        announcement = held.announcement(worker_id, "verifier", settings.name, leaving=leaving)
        return replace(announcement, batch_invariant=settings.batch_invariant, costs=costs, holder=lease.holder)

    await serve_worker(settings, describe, VerifyRequest, tenancy.step, stop, operations)


def main() -> int:
    """Run the verifier; returns the exit status."""
    return run_service("llm_verifier", VerifierSettings, serve, sys.argv[1:])
