"""`espalier bench speculate`: configurations, and figures against hand-made records."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_local.bench.prompts import read_cases
from espalier_local.bench.speculate.configurations import (
    AHEAD,
    BOOSTED,
    DYNAMIC,
    INCREMENTAL,
    Cast,
    Shapes,
    configurations,
    possible,
)
from espalier_local.bench.speculate.goals import goals
from espalier_local.bench.speculate.measure import batches
from espalier_local.bench.speculate.records import Round
from espalier_local.bench.speculate.results import Results
from espalier_local.bench.speculate.statistics import bootstrap, sheet
from espalier_local.bench.speculate.tables import by_batch, by_category, by_ssm, pooled
from espalier_local.bench.speculate.testing import EVERYTHING, SETUP, SHAPES, recorded, round_of, run_of
from espalier_local.client import Ask
from treecore.errors import ConfigError

ONE = ("ssm",)


# -- configurations ---------------------------------------------------------------------------------------------------


def test_every_configuration_of_the_papers_tables_is_there() -> None:
    """Sequence, widths, independent and boosted SSMs, then ours; a tree that is given twice is measured once."""
    assert [(each.name, each.ssms, each.tree) for each in EVERYTHING] == [
        ("incremental", (), None),
        ("sequence <1,1>", ONE, (1, 1)),
        ("tree <2,1>", ONE, (2, 1)),
        ("tree <3,1>", ONE, (3, 1)),
        ("tree <2>", ONE, (2,)),
        ("merged independent", ("i1", "i2"), (1, 1)),
        ("merged boosted", ("b1", "b2"), (1, 1)),
        ("merged + suffix", ("b1", "b2", "suffix"), (1, 1)),
        ("dynamic", ONE, "dynamic"),
        ("dynamic + ahead", ONE, "dynamic"),
        ("dynamic + ahead + merged + suffix", ("b1", "b2", "suffix"), "dynamic"),
    ]
    assert [each.name for each in EVERYTHING if each.draft_ahead] == [AHEAD, "dynamic + ahead + merged + suffix"]
    assert [each.name for each in EVERYTHING if each.is_static] == [
        "sequence <1,1>", "tree <2,1>", "tree <3,1>", "tree <2>",
    ]  # fmt: skip
    assert Shapes(8, 3, (3,)).trees == ((1, 1, 3, 1, 1, 1, 1, 1),)
    assert Shapes(2, 1, (1, 2), ((1, 1), (2, 1))).trees == ((2, 1),)


def test_a_configuration_asks_for_itself_alone() -> None:
    """Whatever the deployment's defaults are."""
    by_name = {each.name: each.ask(Ask("?", 9)) for each in EVERYTHING}
    assert by_name["incremental"] == Ask("?", 9, speculation=False, draft_ahead=False)
    assert by_name["tree <2,1>"] == Ask("?", 9, tree=(2, 1), draft_ahead=False, ssms=ONE)
    assert by_name[AHEAD] == Ask("?", 9, tree="dynamic", draft_ahead=True, ssms=ONE)


@pytest.mark.parametrize(
    ("cast", "running", "faults"),
    [
        (
            Cast("ssm", ("i1", "i2"), ("b1",), "suffix"),
            ("ssm", "b1", "suffix"),
            {"merged independent": "no SSM i1, i2"},
        ),
        (Cast("ssm", suffix="suffix"), ("ssm", "suffix"), {"merged independent": "part", BOOSTED: "part"}),
    ],
)
def test_what_cannot_be_measured_is_left_out(cast: Cast, running: Sequence[str], faults: dict[str, str]) -> None:
    """With the reason."""
    wanted = configurations(cast, SHAPES)
    kept, told = possible(wanted, running)
    assert [each.name for each in kept] == [each.name for each in wanted if each.name not in faults]
    assert len(told) == len(faults)
    assert all(fault in line and name in line for line, (name, fault) in zip(told, faults.items(), strict=True))


def test_without_an_ssm_there_is_incremental_decoding() -> None:
    """And a reason for each of the others."""
    kept, told = possible(configurations(Cast(suffix="suffix"), SHAPES), ())
    assert (kept, len(told)) == ((INCREMENTAL,), len(EVERYTHING) - 1)


def test_prompts_are_taken_from_the_categories_in_turn(tmp_path: Path) -> None:
    """So that a few prompts are of all categories; batches are of the first, and full."""
    path = tmp_path / "p.jsonl"
    lines = ['{"prompt": "a0", "category": "a", "id": "x"}', '{"prompt": "a1", "category": "a"}', '{"prompt": "p"}']
    path.write_text("\n".join(lines))
    cases = read_cases([path], 9)
    assert [(case.id, case.category, case.prompt) for case in cases] == [
        ("x", "a", "a0"), ("p-2", "p", "p"), ("p-1", "a", "a1"),
    ]  # fmt: skip
    assert [[case.prompt for case in batch] for batch in batches(cases, 3, (1, 2))] == [
        ["a0"], ["p"], ["a1"], ["a0", "p"],
    ]  # fmt: skip
    assert [case.category for case in read_cases([], 2)] == ["own", "own"]
    path.write_text(f"{lines[0]}\n{lines[0]}")
    with pytest.raises(ConfigError, match="same `id`"):
        read_cases([path], 9)
    path.write_text("")
    with pytest.raises(ConfigError, match="no prompt"):
        read_cases([path], 9)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_bootstrap_of_a_known_case() -> None:
    """The mean of n values: the interval is near value +- 1.96 s / sqrt(n), and the same each time."""
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)
    found = bootstrap(400, lambda drawn: values[drawn].mean(axis=1))
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.03)
    assert found == bootstrap(400, lambda drawn: values[drawn].mean(axis=1))


@settings(max_examples=20)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=8), st.integers(1, 9))
def test_the_same_everywhere_has_no_spread(tokens: list[int], ms: int) -> None:
    """Ratios of a configuration to itself, and tokens per step of incremental decoding."""
    rounds = [round_of(str(idx), a=run_of((count, count, ms * (idx + 1)))) for idx, count in enumerate(tokens)]
    found = sheet(rounds)
    assert found is not None
    column = found.columns["a"]
    for interval in (column.tokens_per_step, column.faster_than(column), column.more_per_step_than(column)):
        assert (interval.value, interval.low, interval.high) == (1, 1, 1)


def test_comparisons_are_paired_by_prompt() -> None:
    """A prompt that is slow for both ways counts as its ratio; medians are of ratios, not ratios of medians."""
    rounds = [
        round_of("p0", base=run_of((11, 11, 10.0)), fast=run_of((11, 6, 5.0))),
        round_of("p1", base=run_of((21, 21, 100.0)), fast=run_of((21, 5, 80.0))),
        round_of("p2", base=run_of((11, 11, 30.0)), fast=run_of((11, 6, 10.0))),
    ]
    found = sheet(rounds)
    assert found is not None
    base, fast = found.columns["base"], found.columns["fast"]
    assert fast.faster_than(base).value == 2.0  # of 2, 1.25, 3
    assert fast.faster_than(base).low == 1.25
    assert (base.median_ms.value, fast.median_ms.value) == (30.0, 10.0)
    assert fast.tokens_per_step.value == pytest.approx(40 / 14)  # 10 + 20 + 10 by 5 + 4 + 5: the first token is free
    assert fast.more_per_step_than(base).value == pytest.approx(40 / 14)
    assert fast.step_ms == pytest.approx((5 * 10 + 80 * 20 + 10 * 10) / 14)


def test_a_prompt_without_a_second_token_counts_for_nobody() -> None:
    """There is no time between tokens; a pair would be torn."""
    rounds = [
        round_of("p0", a=run_of((1, 1, 9.0)), b=run_of((5, 5, 9.0))),
        round_of("p1", a=run_of((5, 5, 3.0)), b=run_of((5, 5, 9.0), checksum=8)),
    ]
    found = sheet(rounds)
    assert found is not None
    assert (found.num_prompts, found.same_output) == (1, 0)
    assert found.columns["b"].faster_than(found.columns["a"]).value == pytest.approx(1 / 3)
    assert sheet(rounds[:1]) is None
    assert sheet([]) is None


RESULTS = Results(SETUP, recorded())


def test_the_pooled_table_has_a_row_a_configuration() -> None:
    """Means of steps from the totals; what is neither draft nor verify is the rest of the client's time."""
    found = pooled(RESULTS, 0.0)
    assert found is not None
    rows = {row[0]: row[1:] for row in found.rows}
    assert len(rows) == 8
    assert rows["tree <2,1>"] == (
        "3.00 [3.00, 3.00]", "4.0", "5.0", "20.0", "50.0", "75%", "25.0 [25.0, 25.0]", "1.60 [1.60, 1.60]",
    )  # fmt: skip
    assert "4 prompts (4 of them" in found.title
    shares = by_ssm(RESULTS, 0.0)
    assert shares is not None
    assert shares.header == ("decoding", "ssm", "b1", "b2")
    assert shares.rows == ((BOOSTED, "1.0 (0%)", "3.0 (40%)", "none"),)
    assert pooled(RESULTS, 0.5) is None


def test_categories_and_batches_have_a_column_each() -> None:
    """With the number of prompts; merged SSMs are no part of the batches, and batch 1 has the batched prompts only."""
    per_step, speed = by_category(RESULTS, 0.0)
    assert per_step.header == speed.header == ("decoding", "qa (2)", "rag (2)")
    assert ("tree <3,1>", "0.89 [0.89, 0.89]", "0.89 [0.89, 0.89]") in speed.rows
    found = by_batch(RESULTS, 0.0)
    assert found is not None
    assert found.header == ("decoding", "batch 1", "batch 2")
    assert (DYNAMIC, "20.0 (2.00x)", "40.0 (2.00x)") in found.rows
    assert BOOSTED not in {row[0] for row in found.rows}
    assert RESULTS.at_batch(0.0, 1).num_prompts == 2  # type: ignore[union-attr]
    assert by_batch(RESULTS, 0.8) is None


def test_goals_say_what_was_reached() -> None:
    """Each with its own pair of configurations; the peer of two boosted SSMs is the tree of width two."""
    found = {goal: (measured.split()[0], reached) for goal, measured, reached in goals(RESULTS).rows}
    assert found["greedy: tree <3,1> over sequence <1,1>, tokens/step >= 1.25x"] == ("2.00", "yes")
    assert found["greedy: merged boosted over tree <2,1>, tokens/step >= 1x"] == ("1.00", "yes")
    assert found["greedy, batch 1: dynamic over the best static (tree <2,1>), speed >= 1x"] == ("1.25", "yes")
    assert found["T 0.8, batch 1: dynamic + ahead over incremental, speed >= 1.8x"] == ("2.50", "yes")
    assert found["greedy, batch 2: dynamic + ahead over incremental, speed >= 1x"] == ("2.50", "yes")
    slower = [Round(0.0, ("p",), ("c",), {"incremental": run_of((9, 9, 17.0)), AHEAD: run_of((9, 4, 10.0))})]
    assert [reached for *_, reached in goals(Results(SETUP, slower)).rows] == ["no"]
