"""What a worker measures of itself before it serves: the ladder, what ends it, and that nothing of it stays."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from treecore.errors import ConfigError
from treecore.messages import Tokens
from treecore.model.batch import IntArray
from treecore.model.costs import measure_costs
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.params import SamplingParams
from treecore.testing.checkpoints import write_tiny_llama


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A tiny random Llama."""
    return load_decoder(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), dtype="float32")


@pytest.mark.parametrize("block_len", [1, 4, 16, 64])
def test_all_rows_are_measured_and_nothing_stays(decoder: Decoder, block_len: int) -> None:
    """No block is used or cached, whatever its length."""
    held = HeldRequests(decoder, 128, block_len)
    costs = measure_costs(held, "tiny", lambda: 0.0)
    assert [cost.num_rows for cost in costs] == [1, 2, 4, 8, 16, 32, 64]
    assert all(cost.ms > 0.0 for cost in costs)
    assert held.usage().free == held.usage().total


def test_the_ladder_ends_with_the_cache(decoder: Decoder) -> None:
    """16 tokens hold 4 of prefix and 8 rows, the root being both."""
    held = HeldRequests(decoder, 4, 4)
    assert [cost.num_rows for cost in measure_costs(held, "tiny", lambda: 0.0)] == [1, 2, 4, 8]
    assert held.usage().free == 4


def test_a_slow_model_is_measured_once(decoder: Decoder) -> None:
    """Time is up at the second look: one row has its cost all the same."""
    seconds = count(0.0, 1.5)
    costs = measure_costs(HeldRequests(decoder, 64, 4), "tiny", lambda: next(seconds))
    assert [cost.num_rows for cost in costs] == [1]


def test_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    """On the host; on the device the choice says so, with -1. The cache is empty again."""
    broken = load_decoder(write_tiny_llama(tmp_path / "nan"), dtype="float32")
    broken._stage.norm.gain.fill_(float("nan"))

    def choose(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[IntArray]) -> Tokens:
        return np.full(len(logits), -1, np.int32)

    for chooser in (None, choose):
        held = HeldRequests(broken, 64, 4, choose_tokens=chooser)
        with pytest.raises(ConfigError, match="some checkpoint"):
            measure_costs(held, "some checkpoint")
        assert held.usage().free == 64
