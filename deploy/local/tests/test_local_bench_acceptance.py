"""The best static trees that `bench acceptance` prints."""

import pytest

from espalier_local.bench.acceptance import best_trees, expansion_parents


def test_the_full_tree_of_an_expansion() -> None:
    """<2,1>: two children of the root, one of each."""
    assert expansion_parents((2, 1)).tolist() == [0, 0, 1, 2]
    assert expansion_parents(()).tolist() == []


@pytest.mark.parametrize(
    ("rates", "size", "row"),
    [
        ([0.9, 0.01], 4, ("<1,1,1>", "3.44", "3.44", "3")),  # 1 + 0.9 + 0.81 + 0.729
        ([0.4, 0.3], 3, ("<2>", "1.70", "1.70", "1")),
        ([0.5, 0.3], 4, ("<1,2>", "1.90", "2.05", "2")),  # a chain of two and a second child: no <k1,..>
    ],
)
def test_trees_for_rates(rates: list[float], size: int, row: tuple[str, ...]) -> None:
    """By hand."""
    found = {entry[1]: entry[2:] for entry in best_trees("pair", rates)}
    assert found[str(size)] == row
