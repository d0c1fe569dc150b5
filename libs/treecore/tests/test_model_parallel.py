"""How a model is cut over ranks: which layers a stage has, and that stages one behind the other are the whole."""

from pathlib import Path

import pytest
import torch

from treecore.errors import ConfigError
from treecore.model.batch import ForwardBatch
from treecore.model.load import load_decoder
from treecore.model.parallel import Place, split_evenly, stage_layers
from treecore.model.sequence import SequenceCache
from treecore.testing.checkpoints import write_tiny_llama


@pytest.mark.parametrize(
    ("num_layers", "head_cost", "lengths"),
    [
        (30, 8.0, [19, 11]),
        (7, 0.5, [4, 3]),
        (7, 1.0, [2, 2, 2, 1]),
        (3, 9.0, [1, 1, 1]),
        (5, 0.0, [5]),
        (2, 99.0, [1, 1]),
    ],
)
def test_stages_are_balanced_by_cost(num_layers: int, head_cost: float, lengths: list[int]) -> None:
    """The head weighs on the last stage; odd numbers of layers; each stage at least one, in order, none twice."""
    places = [Place(pp_rank=rank, pp_size=len(lengths)) for rank in range(len(lengths))]
    ranges = [stage_layers(num_layers, head_cost, place) for place in places]
    assert [len(layers) for layers in ranges] == lengths
    assert [layer for layers in ranges for layer in layers] == list(range(num_layers))


def test_more_stages_than_layers_are_refused() -> None:
    """By their numbers."""
    with pytest.raises(ConfigError, match="3 pipeline stages for 2 layers"):
        stage_layers(2, 1.0, Place(pp_size=3))


@pytest.mark.parametrize(("size", "num_parts"), [(61, 2), (61, 4), (8, 4), (3, 3)])
def test_even_splits_cover_everything_once(size: int, num_parts: int) -> None:
    """In order; lengths differ by at most one."""
    parts = [split_evenly(size, num_parts, part) for part in range(num_parts)]
    assert [item for part in parts for item in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_stages_one_behind_the_other_are_the_whole(tmp_path: Path) -> None:
    """Three stages of five layers, each with a pool of its own layers; bit by bit."""
    path = write_tiny_llama(tmp_path, num_hidden_layers=5)
    whole = load_decoder(path, dtype="float32")
    stages = [load_decoder(path, dtype="float32", place=Place(pp_rank=rank, pp_size=3)) for rank in range(3)]
    pools = [stage.new_pool(64) for stage in stages]
    assert sum(pool.kv.shape[0] for pool in pools) == 5
    pool = whole.new_pool(64)
    cache = SequenceCache(pool, block_len=4)
    cache.advance("a", 0, list(range(9)))
    cache.extend("a", [7, 8, 9], [0, 0, 2])
    batch = ForwardBatch.from_segments([cache.next_segment("a")])
    x = None
    for stage, own in zip(stages, pools, strict=True):
        x = stage.run_stage(batch, own, x)
    assert x is not None
    assert torch.equal(x, whole.forward(batch, pool))
