"""The frozen wire types and their subjects: all that crosses a process border on the step path.

Token ids and a few scalars only; never tensors, text or pickles. A message addresses one worker and carries one item
a request, so the number of messages does not grow with the batch. Every item is idempotent: it names the request, the
step and where its tokens start, and a worker that gets it twice gives the same answer twice.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

from treecore.expand import Expansion, Growth
from treecore.params import SamplingParams
from treecore.sparse import DraftLaws, Floats, Masses, Supports
from treecore.tree import TokenTree

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
WorkerKind = Literal["ssm", "verifier"]

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Behind each of N nodes: the log-prob of the LLM's token, fp32 [N], and the best k tokens with theirs, [N * k]."""

    chosen: Floats
    top_ids: Tokens
    top: Floats


@dataclass(frozen=True, slots=True)
class DraftItem:
    """One request of a DraftRequest: committed tokens [start, start + len(tokens)), the last of which is the root.

    An empty expansion without growth only fills the SSM's cache (prefill). `params` travels with start 0, else None.
    growth: the tree grows best first instead of by the expansion, which is empty then.
    """

    request_id: RequestId
    step: int
    start: int
    tokens: Tokens
    params: SamplingParams | None
    expansion: Expansion
    growth: Growth | None = None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Manager -> SSM worker.

    session: the manager's with this worker (treecore.sessions); a new one makes it forget the old one's requests.
    `ssm_idx` is the SSM's number there: several SSMs that draw children of one node must draw independently. trace: the
    traceparent of the step's span, if it is traced.
    """

    session: str
    ssm_idx: int
    released: tuple[RequestId, ...]
    items: tuple[DraftItem, ...]
    trace: str = ""


@dataclass(frozen=True, slots=True)
class DraftedItem:
    """The SSM's tree below the root: tokens int32 [N-1], parents int32 [N-1] (0 is the root, 1 the first entry).

    Under the multi_step rules siblings stand in the order in which they were drawn, and `laws` says from what; under
    the others the SSM's best stands first. scores: of a tree that grew best first, fp32 [N-1]: log of the share of each
    node among all that could stand behind its parent, noise included; an estimate that the manager calibrates.
    """

    request_id: RequestId
    step: int
    tokens: Tokens
    parents: Tokens
    laws: DraftLaws | None = None
    scores: Floats | None = None


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """One request of a VerifyRequest: committed tokens [start, start + len(tokens)), then the tree below the last.

    tree_tokens, tree_parents: as in DraftedItem. supports: the tokens at which the acceptance needs p (multi_step).
    A chunk of a prompt has no tree and `wants_token` False.
    """

    request_id: RequestId
    step: int
    start: int
    tokens: Tokens
    params: SamplingParams | None
    tree_tokens: Tokens
    tree_parents: Tokens
    wants_token: bool
    supports: Supports | None = None


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Manager -> verifier (rank 0). session: as in DraftRequest; the group serves one manager at a time (its lease).

    leaves: the manager gives the group up. Without items this only keeps the lease, or asks for it. trace: as there.
    """

    session: str
    released: tuple[RequestId, ...]
    items: tuple[VerifyItem, ...]
    leaves: bool = False
    trace: str = ""


@dataclass(frozen=True, slots=True)
class VerifiedItem:
    """The LLM's token after each node, int32 [N], root first; empty for a prompt chunk.

    Where the item gave a support, the token is drawn from p outside it (-1 if nothing is left there), and `masses` has
    p on it. `logprobs`: if the request's parameters ask for them. The root's token alone, where more was asked and no
    support was given: the cache had no room for the tree. num_found: tokens of the item whose K and V the verifier had
    already, from another request or an earlier one.
    """

    request_id: RequestId
    step: int
    tokens: Tokens
    num_found: int
    masses: Masses | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """The worker could not do this item. held_len: committed tokens that it holds; the rest must be sent again.

    `out_of_blocks`: it holds nothing of the request any more, so that others fit.

    reason: an error code of treecore.errors (`state_missing`, `out_of_blocks`, `malformed_message`, `model_failed`), or
    `grammar_failed`.
    """

    request_id: RequestId
    step: int
    held_len: int
    reason: str


@dataclass(frozen=True, slots=True)
class DraftReply:
    """SSM worker -> manager. forward_ms, sample_ms: time inside model forwards, and choosing tokens from logits."""

    worker_id: WorkerId
    items: tuple[DraftedItem, ...]
    refused: tuple[RefusedItem, ...]
    forward_ms: float
    sample_ms: float
    blocks: "BlockUsage"


@dataclass(frozen=True, slots=True)
class VerifyReply:
    """Verifier -> manager. forward_ms, sample_ms: time inside model forwards, and choosing tokens from logits.

    holder: the manager that has the group, "" if none. Nothing was done for anybody else.
    """

    worker_id: WorkerId
    items: tuple[VerifiedItem, ...]
    refused: tuple[RefusedItem, ...]
    forward_ms: float
    sample_ms: float
    blocks: "BlockUsage"
    holder: str = ""


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """The integrity equation of a KV cache: free + used + cached = total (blocks of `block_len` tokens).

    cached: nobody uses them, but who comes with their text will; they count as room.
    """

    free: int
    used: int
    cached: int
    total: int
    block_len: int

    @property
    def room(self) -> int:
        """Blocks that can be had now."""
        return self.free + self.cached

    def holding(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` fill."""
        return -(-num_tokens // self.block_len)


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """A forward over so many rows took so long; whoever tells it says whether the choice of tokens is included."""

    num_rows: int
    ms: float


@dataclass(frozen=True, slots=True)
class Announcement:
    """Worker -> everyone, periodically and when asked: I am here and can step. `leaving` is the last one.

    name: the SSM's or LLM's name. eos_token_ids and context_len are the model's own. batch_invariant: its logits have
    the same bits with any tree and batch. costs: of forwards alone, measured at start, fewest rows first; empty:
    unknown. holder: the manager that has this verifier group, "" if it is free. Raises ValueError for no model's.
    """

    worker_id: WorkerId
    kind: WorkerKind
    name: str
    vocab_size: int
    context_len: int
    eos_token_ids: tuple[int, ...]
    blocks: BlockUsage
    leaving: bool
    batch_invariant: bool = False
    costs: tuple[ForwardCost, ...] = ()
    holder: str = ""

    def __post_init__(self) -> None:
        is_possible = (
            min(self.vocab_size, self.context_len, self.blocks.block_len) >= 1
            and min(self.blocks.free, self.blocks.used, self.blocks.cached, self.blocks.total) >= 0
            and all(0 <= token < self.vocab_size for token in self.eos_token_ids)
            and all(cost.num_rows >= 1 and cost.ms > 0 for cost in self.costs)
            and all(cost.num_rows < later.num_rows for cost, later in pairwise(self.costs))
        )
        if not is_possible:
            raise ValueError(f"impossible announcement: {self}")


@dataclass(frozen=True, slots=True)
class Hello:
    """Who has just started or reconnected asks all whom it may need to announce themselves at once."""

    sender: str


Message = DraftRequest | DraftReply | VerifyRequest | VerifyReply | Announcement | Hello

ANNOUNCE = "announce"
HELLO = "hello"


def step_subject(kind: WorkerKind, worker_id: WorkerId) -> str:
    """Where a worker takes its DraftRequest or VerifyRequest."""
    return f"{kind}.{worker_id}.step"


def split_tree(tree: TokenTree) -> tuple[Tokens, Tokens]:
    """The tree below its root, as items carry it."""
    return tree.tokens[1:], tree.parents[1:]


def join_tree(root: int, tokens: Tokens, parents: Tokens, ssm_idx: int = 0, laws: DraftLaws | None = None) -> TokenTree:
    """The inverse of `split_tree`; raises WireError if the arrays are no tree, or not one of its laws."""
    return TokenTree.checked(
        np.concatenate([np.array([root], np.int32), tokens]),
        np.concatenate([np.array([-1], np.int32), parents]),
        ssm_idx,
        laws,
    )
