"""The group at work: rank 0's decoder that is all ranks', and what the others do with its commands.

Knows commands and pipelines; must not know requests. All ranks hold the same slots: a slot means the same everywhere.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from llm_verifier.group.collectives import CollectiveFailed, Collectives
from llm_verifier.group.commands import Command, Forward, Move, NewPool, pack, unpack
from llm_verifier.group.pipeline import Pipeline
from llm_verifier.group.watch import FollowerWatch, LeaderWatch
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.kv_pool import KvPool
from treecore.model.spec import ModelSpec


class GroupPool:
    """Rank 0's KV cache, whose moves all ranks make."""

    def __init__(self, own: KvPool, watch: LeaderWatch) -> None:
        self.own = own
        self._watch = watch

    @property
    def num_slots(self) -> int:
        """How many tokens the group holds."""
        return self.own.num_slots

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """See KvPool."""
        self._watch.command(pack(Move(src_slots, dst_slots)))
        self.own.move(src_slots, dst_slots)


class GroupDecoder:
    """What HeldRequests computes with at rank 0: every call is one command to all others, then rank 0's own part."""

    def __init__(self, decoder: Decoder, collectives: Collectives, watch: LeaderWatch) -> None:
        self._decoder = decoder
        self._pipeline = Pipeline(decoder, collectives)
        self._activity = collectives.activity
        self._watch = watch

    @property
    def spec(self) -> ModelSpec:
        """The whole model's."""
        return self._decoder.spec

    @property
    def waited_s(self) -> float:
        """How long rank 0 has been in collectives, waiting for the others included."""
        return self._activity.waited_s

    def new_pool(self, num_slots: int) -> GroupPool:
        """A KV cache of `num_slots` tokens at every rank."""
        self._watch.command(pack(NewPool(num_slots)))
        return GroupPool(self._decoder.new_pool(num_slots), self._watch)

    def forward(self, batch: ForwardBatch, pool: GroupPool) -> Tensor:
        """See Decoder. Raises GroupFailed where the watch leaves the process alive."""
        self._watch.command(pack(Forward(batch.segments)))
        try:
            with self._activity.computing():
                logits = self._pipeline.run(batch, pool.own)
        except CollectiveFailed as error:
            self._watch.fail(error.kind, str(error))
        assert logits is not None, "rank 0 gets them"
        return logits


def follow(decoder: Decoder, collectives: Collectives, watch: FollowerWatch) -> None:
    """Do what rank 0 says until it says stop. Raises GroupFailed where the watch leaves the process alive."""
    follower = _Follower(decoder, Pipeline(decoder, collectives))
    while (packed := watch.next_command()) is not None:
        try:
            with collectives.activity.computing():
                follower.do(unpack(packed))
        except CollectiveFailed as error:
            watch.fail(error.kind, str(error))
        except Exception as error:  # a rank that failed takes its group down, and says why
            watch.fail("failed", f"failed: {type(error).__name__}: {error}")


class _Follower:
    def __init__(self, decoder: Decoder, pipeline: Pipeline) -> None:
        self._decoder = decoder
        self._pipeline = pipeline
        self._pool: KvPool | None = None

    def do(self, command: Command) -> None:
        if isinstance(command, NewPool):
            self._pool = self._decoder.new_pool(command.num_slots)
            return
        assert self._pool is not None, "a pool comes first"
        if isinstance(command, Move):
            self._pool.move(command.src_slots, command.dst_slots)
        else:
            self._pipeline.run(ForwardBatch.from_segments(command.segments), self._pool)
