"""One stream as its gateway has it: the tokens that came, and which admission of it the next ones belong to.

Knows deltas; must not know how they come, or where a stream is admitted.
"""

import asyncio
from dataclasses import dataclass, field

from request_manager.contract import Generation, TokenDelta
from request_manager.relay.wire import error_of, from_wire
from request_manager.roster import Member
from treecore.errors import EspalierError, Unavailable
from treecore.messages import RequestId
from treecore.streams import Delta, ManagerAnnouncement

ManagerMember = Member[ManagerAnnouncement]

_MAX_LOSSES = 10  # without a token in between: a request that no manager survives ends with an error


class Lost(Exception):
    """The manager of that admission is gone, or something that it sent: to be admitted again."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class Stream:
    """One request as the gateway has it.

    number: of its last admission, -1 while it has to be admitted. is_placed: whether a manager has said that it has it.

    num_steps_before: of the managers before this one. num_losses: since it got a token. checked: see RemoteManager.
    """

    generation: Generation
    output: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_steps_before: int = 0
    num_losses: int = 0
    number: int = -1
    manager: ManagerMember | None = None
    is_placed: bool = False
    inbox: asyncio.Queue[TokenDelta | Exception] = field(default_factory=asyncio.Queue)
    checked: tuple[int, int] | None = None
    is_over: bool = False

    @property
    def request_id(self) -> RequestId:
        """The client's request, whoever has it."""
        return self.generation.request_id

    def take(self, delta: Delta) -> None:
        """The next tokens; what is there already is passed over, and what does not follow shows that some were lost."""
        if delta.number != self.number or self.is_over:
            return
        if delta.start > len(self.output):
            self.lose()
        elif delta.error is not None:
            self.lose() if delta.error.code == EspalierError.code else self.inbox.put_nowait(error_of(delta.error))
        elif delta.start == len(self.output):
            self.output += delta.tokens
            self.num_losses = 0
            self.num_steps = self.num_steps_before + delta.steps
            self.is_over = delta.finish_reason is not None
            self.inbox.put_nowait(from_wire(delta, self.num_steps_before))

    def lose(self) -> None:
        """Have it admitted again, unless that goes on for ever."""
        if self.number < 0:
            return
        self.num_losses += 1
        hopeless = Unavailable("the request was lost too often")
        self.inbox.put_nowait(Lost(self.number) if self.num_losses <= _MAX_LOSSES else hopeless)
        self.number, self.is_placed = -1, False
