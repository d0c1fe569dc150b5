"""How a model is cut over ranks: which layers and heads each has, which bytes it reads, and what they are together."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treecore.errors import ConfigError
from treecore.model.batch import ForwardBatch
from treecore.model.checkpoint import SafetensorsCheckpoint
from treecore.model.load import load_decoder
from treecore.model.parallel import Place, share_heads, split_evenly, stage_layers
from treecore.model.sequence import SequenceCache
from treecore.testing.checkpoints import write_tiny_draft, write_tiny_llama
from treecore.testing.families import write_family
from treecore.testing.ranks import ThreadGroup


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


@given(num_kv_heads=st.integers(1, 9), group_size=st.integers(1, 8), data=st.data())
def test_heads_are_shared_out_whole(num_kv_heads: int, group_size: int, data: st.DataObject) -> None:
    """Every query head once, in order; each finds its own KV head, whichever way the rank counts them."""
    num_heads = num_kv_heads * group_size
    tp_size = data.draw(st.integers(1, num_heads))
    shares = [share_heads(num_heads, num_kv_heads, Place(rank, tp_size)) for rank in range(tp_size)]
    assert [head for share in shares for head in share.q] == list(range(num_heads))
    for share in shares:
        assert len(share.q) == len(share.kv) * share.group_size > 0
        assert [share.kv[idx // share.group_size] for idx in range(len(share.q))] == [
            head // group_size for head in share.q
        ]
    if tp_size <= num_kv_heads:
        assert [head for share in shares for head in share.kv] == list(range(num_kv_heads))


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    """By their numbers; so are more than inner features or tokens."""
    path = write_tiny_llama(tmp_path / "narrow", intermediate_size=3)
    with pytest.raises(ConfigError, match="5 tensor-parallel ranks for 4 heads"):
        load_decoder(path, dtype="float32", place=Place(0, 5))
    with pytest.raises(ConfigError, match="4 tensor-parallel ranks for intermediate_size=3"):
        load_decoder(path, dtype="float32", place=Place(0, 4))


@dataclass(slots=True)
class Reads:
    """How often each entry of each tensor was read, by whomever."""

    checkpoint: SafetensorsCheckpoint
    counts: dict[str, np.ndarray] = field(default_factory=dict)

    def note(self, name: str, rows: range | None = None, columns: range | None = None) -> None:
        """One read more of these rows and columns."""
        count = self.counts.setdefault(name, np.zeros(self.checkpoint.shape(name), np.int64))
        cut = count if rows is None else count[rows.start : rows.stop]
        cut[..., slice(None) if columns is None else slice(columns.start, columns.stop)] += 1


def reads_of(path: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What loading the part of one rank reads."""
    reads, whole, part = Reads(SafetensorsCheckpoint(path)), SafetensorsCheckpoint.tensor, SafetensorsCheckpoint.part

    def note_whole(self: SafetensorsCheckpoint, name: str) -> Tensor:
        reads.note(name)
        return whole(self, name)

    def note_part(self: SafetensorsCheckpoint, name: str, rows: range, columns: range | None = None) -> Tensor:
        reads.note(name, rows, columns)
        return part(self, name, rows, columns)

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsCheckpoint, "tensor", note_whole)
        patch.setattr(SafetensorsCheckpoint, "part", note_part)
        load_decoder(path, dtype="float32", place=place)
    return reads


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma3", "opt"])
def test_ranks_read_every_byte_of_a_matrix_once_among_them(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2x2: matrices, and biases of split rows, once; what all ranks of a stage need, by each of them; nothing else."""
    path = write_family(tmp_path, case, tie_word_embeddings=False)
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(()))
    for place in (Place(0, 2, 0, 2), Place(1, 2, 0, 2), Place(0, 2, 1, 2), Place(1, 2, 1, 2)):
        for name, count in reads_of(path, place, monkeypatch).counts.items():
            assert count.max() == 1, name
            totals[name] = totals[name] + count
    assert totals.keys() == SafetensorsCheckpoint(path).names()
    for name, total in totals.items():
        by_both = "norm" in name or "positions" in name or name.endswith(("out_proj.bias", "fc2.bias"))
        read = total[2:] if "positions" in name else total  # the first two rows are no position's
        assert (read == 1 + by_both).all(), name


def test_ranks_that_share_a_kv_head_keep_it_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, two KV heads: k and v are read twice, q once; each rank's cache has one head."""
    path = write_tiny_llama(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    reads = [reads_of(path, Place(rank, 4), monkeypatch).counts for rank in range(4)]
    layer = "model.layers.0.self_attn"
    for name, times in (("q_proj", 1), ("k_proj", 2), ("v_proj", 2), ("o_proj", 1)):
        assert (sum(count[f"{layer}.{name}.weight"] for count in reads) == times).all()
    assert load_decoder(path, dtype="float32", place=Place(3, 4)).new_pool(8).kv.shape == (2, 8, 2, 1, 8)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(3, 1), (4, 2), (5, 1), (8, 1)])
def test_any_number_of_ranks_computes_the_same(tmp_path: Path, tp_size: int, pp_size: int) -> None:
    """Eight heads on two KV heads, 61 tokens, 51 inner features: uneven shares everywhere."""
    path = write_tiny_llama(tmp_path, num_attention_heads=8, num_key_value_heads=2, intermediate_size=51)
    whole, group = load_decoder(path, dtype="float32"), ThreadGroup(path, tp_size, pp_size, dtype="float32")
    pool, pools = whole.new_pool(64), group.new_pool(64)
    cache = SequenceCache(pool, block_len=4)
    cache.advance("a", 0, list(range(40, 61)))
    cache.extend("a", [7, 8, 9], [0, 0, 2])
    batch = ForwardBatch.from_segments([cache.next_segment("a")])
    torch.testing.assert_close(group.forward(batch, pools), whole.forward(batch, pool), rtol=0, atol=1e-4)
    group.close()


def test_a_draft_can_be_cut_as_well(tmp_path: Path) -> None:
    """The teacher's embedding and its picked head rows, over two ranks and two stages."""
    teacher = write_tiny_llama(tmp_path / "teacher", tie_word_embeddings=False)
    draft = write_tiny_draft(tmp_path / "draft", token_ids=[3, 60, 5], tie_word_embeddings=False)
    options = {"dtype": "float32", "embedding_from": teacher}
    whole, group = load_decoder(draft, **options), ThreadGroup(draft, 2, 2, **options)
    pool, pools = whole.new_pool(16), group.new_pool(16)
    cache = SequenceCache(pool, block_len=4)
    cache.advance("a", 0, [1, 60, 31, 30, 0])
    batch = ForwardBatch.from_segments([cache.next_segment("a")])
    logits = group.forward(batch, pools)
    assert logits.shape == (1, 3)
    torch.testing.assert_close(logits, whole.forward(batch, pool), rtol=0, atol=1e-4)
    group.close()
