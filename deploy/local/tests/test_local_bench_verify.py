"""`espalier bench verify` on a tiny model, alone and cut over two ranks."""

from pathlib import Path

import pytest

from espalier_local.bench.verify import kind_of
from espalier_local.cli import main
from treecore.testing.checkpoints import write_tiny_llama
from treecore.testing.segments import binary_tree, path_segments, tree_segments


@pytest.mark.parametrize("flags", [(), ("--tensor-parallel-size", "2", "--threads", "1")])
def test_prints_a_row_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    """Every shape has its row, and the shares of a step add up to it; ranks that wait say so."""
    model = write_tiny_llama(tmp_path / "tiny", vocab_size=300)
    shapes = ["--nodes", "1", "4", "--batch", "2", "--context", "20", "--rounds", "2"]
    assert main(["bench", "verify", "--model", str(model), "--ssm", "none", *shapes, *flags]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["nodes", "batch", "context"]
    assert [row.split()[:3] for row in rows] == [["1", "2", "20"], ["4", "2", "20"]]
    for row in rows:
        shares = [int(cell.removesuffix("%")) for cell in row.split() if cell.endswith("%")]
        assert len(shares) == 6
        assert sum(shares) == pytest.approx(100, abs=4)
        assert (shares[4] > 0) == bool(flags)


def test_a_context_beyond_the_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that names it."""
    model = write_tiny_llama(tmp_path / "tiny")
    assert main(["bench", "verify", "--model", str(model), "--ssm", "none", "--context", "1000"]) == 1
    assert "--context 1000" in capsys.readouterr().err


def test_sequences_are_the_trees_paths() -> None:
    """A chain for each leaf, at the positions of its nodes; requests never share the slots that they write."""
    parents = binary_tree(6)
    assert parents == [-1, 0, 0, 1, 1, 2]
    trees, paths = tree_segments(parents, 10, 2, 50), path_segments(parents, 10, 2, 50)
    assert [segment.num_rows for segment in trees] == [6, 6]
    assert [segment.positions.tolist() for segment in paths] == [[10, 11, 12]] * 6
    for segments in (trees, paths):
        written = [slot for segment in segments for slot in segment.slots.tolist()]
        assert len(set(written)) == len(written)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("quantized::linear_dynamic_fp16", "linears"),
        ("mkldnn::_linear_pointwise", "linears"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("c10d::allreduce_", "collectives"),
        ("aten::silu", "other ops"),
    ],
)
def test_operations_have_kinds(operation: str, kind: str) -> None:
    """By their names in torch."""
    assert kind_of(operation) == kind
