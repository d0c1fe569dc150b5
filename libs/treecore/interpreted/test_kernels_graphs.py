"""Graphed steps against plain ones, with a capture that only calls again: padding, buckets, refilling."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from treecore.model.backend import Hardware
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.graphs import GraphedDecoder, Replay, capture_cuda
from treecore.model.load import load_decoder
from treecore.model.sequence import SequenceCache
from treecore.testing.checkpoints import write_tiny_llama

BLOCK_LEN = 8


class Recorder:
    """A capture that counts; without a GPU a replay computes anew, from and to the same memory."""

    def __init__(self, device: str) -> None:
        self.count = 0
        self._device = device

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        self.count += 1
        if self._device == "cuda":
            return capture_cuda(compute)
        logits = compute()
        return lambda: logits.copy_(compute()), logits


def drive(decoder: Decoder | GraphedDecoder) -> list[torch.Tensor]:
    """A prefill that no graph has, then trees of 1 to 6 nodes behind one and two requests, over a NaN-filled cache."""
    pool = decoder.new_pool(256)
    pool.kv.fill_(float("nan"))
    cache = SequenceCache(pool, BLOCK_LEN)
    tokens = np.random.default_rng(0).integers(3, 61, 200).tolist()
    logits = []

    def step(*request_ids: str) -> None:
        segments = [cache.next_segment(request_id) for request_id in request_ids]
        batch = ForwardBatch.from_segments(segments)
        logits.append(decoder.forward(batch, pool).clone())
        for request_id, segment in zip(request_ids, segments, strict=True):
            cache.mark_written(request_id, segment.num_rows)

    cache.advance("a", 0, tokens[:40])
    cache.advance("b", 0, tokens[100:120])
    step("a", "b")
    for num_nodes, together in ((1, False), (2, True), (5, False), (6, True), (5, True), (2, False)):
        for request_id, first in (("a", 40), ("b", 20)):
            cache.advance(request_id, first, [7, 9])
            cache.extend(request_id, list(range(20, 20 + num_nodes)), [idx // 2 for idx in range(num_nodes)])
        step(*("ab" if together else "a"))
    return logits


def test_graphed_steps_equal_plain_ones(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, from fewer graphs than steps."""
    monkeypatch.setattr("treecore.model.graphs.MAX_ROWS", 32)
    path = write_tiny_llama(tmp_path, vocab_size=128)
    decoder = load_decoder(path, dtype="float32", on=Hardware(device, "triton", BLOCK_LEN))
    recorder = Recorder(device)
    for wanted, found in zip(drive(decoder), drive(GraphedDecoder(decoder, recorder)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert 1 <= recorder.count <= 5


def test_no_block_has_the_spare_slot(tmp_path: Path) -> None:
    """Padding rows write there, whatever a block's length."""
    pool = GraphedDecoder(load_decoder(write_tiny_llama(tmp_path), dtype="float32")).new_pool(8)
    assert SequenceCache(pool, block_len=1).usage().total == 8
    assert len(pool.layer(0)) == 9
