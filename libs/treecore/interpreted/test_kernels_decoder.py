"""A decoder on the Triton backend against the same decoder on torch: prefill, trees, accepted paths."""

from pathlib import Path

import numpy as np
import pytest
import torch

from treecore.errors import ConfigError
from treecore.model.backend import Hardware
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.load import load_decoder
from treecore.model.sequence import SequenceCache
from treecore.testing.checkpoints import write_tiny_llama

BLOCK_LEN = 8


class Run:
    """One decoder and its cache, NaN wherever nothing was written."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.pool = decoder.new_pool(512)
        self.pool.kv.fill_(float("nan"))
        self.cache = SequenceCache(self.pool, BLOCK_LEN)

    def step(self, *request_ids: str) -> list[torch.Tensor]:
        """The logits of all pending rows."""
        segments = [self.cache.next_segment(request_id) for request_id in request_ids]
        batch = ForwardBatch.from_segments(segments)
        logits = batch.split_logits(self._decoder.forward(batch, self.pool))
        for request_id, segment in zip(request_ids, segments, strict=True):
            self.cache.mark_written(request_id, segment.num_rows)
        return logits


def drive(run: Run) -> list[torch.Tensor]:
    """Two requests: prefill, trees behind them, an accepted path (rows move), the next trees."""
    tokens = np.random.default_rng(0).integers(3, 61, 200).tolist()
    logits = []
    run.cache.advance("a", 0, tokens[:90])
    run.cache.advance("b", 0, tokens[100:103])
    run.cache.extend("b", [7, 8, 9, 10], [0, 0, 1, 3])
    logits += run.step("a", "b")
    run.cache.advance("b", 3, [7, 9, 10, 30])
    run.cache.extend("b", [11, 12], [0, 1])
    run.cache.extend("a", [20, 21, 22, 23, 24], [0, 0, 2, 2, 4])
    logits += run.step("b", "a")
    run.cache.advance("a", 90, [21, 23, 40])
    run.cache.extend("a", list(range(30, 50)), [idx // 2 for idx in range(20)])
    return logits + run.step("a")


@pytest.mark.parametrize("config", [{}, {"num_key_value_heads": 1, "head_dim": 20}], ids=str)
def test_decoders_agree_on_both_backends(config: dict[str, int], tmp_path: Path, device: str) -> None:
    """Logits of every node, fp32."""
    path = write_tiny_llama(tmp_path, **config)
    runs = [
        Run(load_decoder(path, dtype="float32", on=Hardware(device, name, BLOCK_LEN))) for name in ("torch", "triton")
    ]
    for wanted, found in zip(*(drive(run) for run in runs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_heads_that_no_tile_holds_are_refused(tmp_path: Path, device: str) -> None:
    """At load, by name."""
    path = write_tiny_llama(tmp_path, head_dim=260)
    with pytest.raises(ConfigError, match="attention triton: heads of 260"):
        load_decoder(path, dtype="float32", on=Hardware(device, "triton"))
