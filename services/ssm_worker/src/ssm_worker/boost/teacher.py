"""The teacher at work: many dialogues at once, a row each, refilled as they end. Knows models and dialogues, no files.

Every position behind the template's opening is recorded with the teacher's top log-probs, prompts included.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.dialogue import Dialogue, Plan
from ssm_worker.boost.turns import Turns
from treecore.errors import ConfigError
from treecore.messages import RequestId, VerifyItem
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.sampling import best_tokens

NUM_TOP = 20
BLOCK_LEN = 16
_OWNER = "boost"
_NO_TREE = np.empty(0, np.int32)
_NO_SAMPLING = SamplingParams(0.0, 0, 1.0, Seed(0))  # a Dialogue says how each of its tokens is drawn


@dataclass(frozen=True, slots=True)
class Written:
    """A dialogue that is over. index: its plan's."""

    index: int
    sequence: TeacherSequence


@dataclass(frozen=True, slots=True)
class Record:
    """Room for one dialogue's log-probs, int32 and float16 [row_len, K].

    Taken once and used again: small arrays that outlive the step's 12 MB of logits would fragment the heap.
    """

    top_ids: NDArray[np.int32]
    top_logp: NDArray[np.float16]

    @classmethod
    def with_room(cls, row_len: int, num_top: int) -> "Record":
        """An empty record."""
        return cls(np.zeros((row_len, num_top), np.int32), np.zeros((row_len, num_top), np.float16))


@dataclass(slots=True, eq=False)
class _Row:
    """A dialogue in progress and the record that it fills; `num_recorded` rows of it so far."""

    dialogue: Dialogue
    record: Record
    num_recorded: int = 0

    @property
    def request_id(self) -> RequestId:
        return RequestId(str(self.dialogue.plan.index))

    def item(self) -> VerifyItem:
        """The next chunk as the model's holder of requests takes it."""
        num_fed = self.dialogue.num_fed
        tokens = np.array(self.dialogue.next_chunk(), np.int32)
        params = None if num_fed else _NO_SAMPLING
        return VerifyItem(self.request_id, num_fed, num_fed, tokens, params, _NO_TREE, _NO_TREE, True)

    def choose(self, logits: NDArray[np.float32]) -> int | None:
        """The teacher's token behind the next chunk, or None where it is fixed already."""
        if not self.dialogue.wants_token:
            return None
        position = len(self.dialogue.tokens)
        return int(best_tokens(logits, None, self.dialogue.params(), position)[0])

    def note(self, top_ids: NDArray[np.int64], top_logp: NDArray[np.float32]) -> None:
        """Record what the teacher expects behind the next chunk."""
        self.record.top_ids[self.num_recorded] = top_ids
        self.record.top_logp[self.num_recorded] = top_logp
        self.num_recorded += 1

    def written(self) -> Written:
        """The finished dialogue, in memory of its own."""
        plan = self.dialogue.plan
        return Written(
            plan.index,
            TeacherSequence(
                tokens=np.array(self.dialogue.tokens, np.int32),
                start=plan.start,
                temperature=plan.temperature,
                top_ids=self.record.top_ids[: self.num_recorded].copy(),
                top_logp=self.record.top_logp[: self.num_recorded].copy(),
            ),
        )


class Teacher:
    """Writes dialogues of up to `row_len` tokens, `num_rows` at a time."""

    def __init__(self, decoder: Decoder, turns: Turns, num_rows: int, row_len: int, num_top: int = NUM_TOP) -> None:
        if row_len > decoder.spec.context_len:
            raise ConfigError(
                f"dialogues of {row_len} tokens exceed {decoder.spec.name}'s context of {decoder.spec.context_len}"
            )
        self._decoder = decoder
        self._turns = turns
        self._num_rows, self._row_len = num_rows, row_len
        self._num_top = min(num_top, decoder.spec.vocab_size)

    def write(self, plans: Iterable[Plan]) -> Iterator[Written]:
        """Each dialogue as it ends, which is not the order of the plans; one plan is taken whenever a row is free.

        The same plans give the same bits, whatever was written before: the cache starts empty. A dialogue's tokens
        depend on its plan and on the model alone, up to rounding in kernels whose batches have other neighbours.
        """
        held = HeldRequests(self._decoder, self._num_rows * -(-self._row_len // BLOCK_LEN), BLOCK_LEN)
        room = [Record.with_room(self._row_len, self._num_top) for _ in range(self._num_rows)]
        return _Desk(held, self._turns, room).write(plans)


class _Desk:
    """Dialogues in progress. Owns their KV cache and the records that they fill, `room`: one for each row."""

    def __init__(self, held: HeldRequests, turns: Turns, room: list[Record]) -> None:
        self._held = held
        self._turns = turns
        self._room = room

    def write(self, plans: Iterable[Plan]) -> Iterator[Written]:
        """See Teacher.write."""
        waiting = iter(plans)
        released: list[RequestId] = []
        rows: list[_Row] = []
        while True:
            rows += [self._open(plan) for plan in itertools.islice(waiting, len(self._room))]
            if not rows:
                return
            self._held.begin_step(_OWNER, released)
            over = self._step(rows)
            rows = [row for row in rows if row not in over]
            released = [self._close(row) for row in over]
            yield from [row.written() for row in over]  # all before a record is filled again

    def _open(self, plan: Plan) -> _Row:
        return _Row(Dialogue(plan, self._turns), self._room.pop())

    def _close(self, row: _Row) -> RequestId:
        self._room.append(row.record)
        return row.request_id

    def _step(self, rows: list[_Row]) -> list[_Row]:
        """Every row reads its next chunk, in one forward. Returns the rows that are over."""
        for row in rows:
            refused = self._held.take(row.item())
            assert refused is None, "the cache has room for every row"
        logits = np.concatenate(self._held.compute([row.request_id for row in rows]))
        num_top = rows[0].record.top_ids.shape[1]
        ids, logp = (part.numpy() for part in top_logp(torch.from_numpy(logits), num_top))
        over = []
        for row, row_logits, row_ids, row_logp in zip(rows, logits, ids, logp, strict=True):
            row.note(row_ids, row_logp)
            if row.dialogue.feed(row.choose(row_logits)):
                over.append(row)
        return over


def top_logp(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """The `num_top` most likely tokens of each row of `logits` [R, V], best first: int64 ids and fp32 log-probs."""
    best = logits.topk(num_top, dim=-1)
    return best.indices, best.values - logits.logsumexp(-1, keepdim=True)
