"""The frozen wire types between gateways and managers: requests that are admitted, and the tokens that come back.

A gateway owns its streams: it knows the prompt and every token that it has, so that another manager can go on behind
them. Whatever is lost on the way is asked for again with the tokens that are there; randomness is keyed by position, so
that the rest is the same. Token ids and scalars only.
"""

from dataclasses import dataclass
from typing import Literal, NewType

from treecore.expand import Expansion
from treecore.messages import Logprobs, RequestId, Tokens, WorkerId
from treecore.params import SamplingParams

GatewayId = NewType("GatewayId", str)
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Admission:
    """Gateway -> manager: generate this behind `output`, the tokens that are there already.

    number: of all that this gateway has sent; what an earlier admission of the request yields is no longer wanted.
    expansion: the tree that the request names; None, unless is_dynamic, is the deployment's choice. ssms: None for all.
    trace: the traceparent of the answer's span, if it is traced.
    """

    gateway_id: GatewayId
    request_id: RequestId
    number: int
    prompt: Tokens
    output: Tokens
    params: SamplingParams
    max_tokens: int
    speculation: bool
    expansion: Expansion | None
    is_dynamic: bool
    draft_ahead: bool | None
    ssms: tuple[str, ...] | None
    trace: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why something was not done, or failed: a code of treecore.errors, and what people and clients are told of it."""

    code: str
    message: str
    param: str | None = None
    reason: str | None = None
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionReply:
    """Manager -> gateway. refusal: None if the request was admitted."""

    refusal: Verdict | None


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that one step committed to a request, as in contract.TokenDelta; or the error that ended it.

    number: of the admission. start: how many tokens of output stand before them.
    """

    request_id: RequestId
    number: int
    start: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    steps: int
    num_accepted: int
    num_found: int
    logprobs: Logprobs | None
    error: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Deltas:
    """Manager -> gateway: what a step brought all of its requests."""

    items: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream that a gateway has open; number: of its admission."""

    request_id: RequestId
    number: int


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """Gateway -> manager, now and then: all that it has open there. What was admitted before and is not in it is over.

    number: as in Admission.
    """

    gateway_id: GatewayId
    number: int
    items: tuple[OpenStream, ...]


@dataclass(frozen=True, slots=True)
class StreamsReply:
    """Manager -> gateway: of each stream, in that order, how many tokens were sent; -1 for one that it has not."""

    num_sent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a gateway must know of the LLM to validate a request. Raises ValueError for no model's.

    Lengths in tokens; max_tree_nodes with the root.
    """

    name: str
    vocab_size: int
    context_len: int
    eos_token_ids: tuple[int, ...]
    max_tree_nodes: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.context_len, self.max_tree_nodes) < 1:
            raise ValueError(f"impossible card: {self}")


@dataclass(frozen=True, slots=True)
class ManagerAnnouncement:
    """Manager -> everyone, periodically and when asked. is_ready: it has a verifier, or can have one.

    num_running, num_waiting: requests.
    """

    worker_id: WorkerId
    leaving: bool
    is_ready: bool
    num_running: int
    num_waiting: int
    card: ModelCard

    @property
    def kind(self) -> Literal["manager"]:
        """As workers' announcements have one."""
        return "manager"

    @property
    def name(self) -> str:
        """The LLM's."""
        return self.card.name


Message = Admission | AdmissionReply | Deltas | OpenStreams | StreamsReply | ManagerAnnouncement

ANNOUNCE_MANAGER = "announce.manager"


def admit_subject(manager_id: WorkerId) -> str:
    """Where a manager takes Admissions."""
    return f"manager.{manager_id}.admit"


def streams_subject(manager_id: WorkerId) -> str:
    """Where a manager takes OpenStreams."""
    return f"manager.{manager_id}.streams"


def deltas_subject(gateway_id: GatewayId) -> str:
    """Where a gateway takes Deltas."""
    return f"gateway.{gateway_id}.deltas"
