"""`espalier bench speculate`: configurations, figures against hand-made records, the journal, the report."""

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_local.bench.prompts import read_cases
from espalier_local.bench.speculate.command import add_parser, setup_of
from espalier_local.bench.speculate.configurations import (
    AHEAD,
    BOOSTED,
    DYNAMIC,
    INCREMENTAL,
    Cast,
    Configuration,
    Shapes,
    configurations,
    possible,
)
from espalier_local.bench.speculate.goals import goals
from espalier_local.bench.speculate.measure import Measurement, batches
from espalier_local.bench.speculate.records import Decoded, Journal, Round, Run, Setup, read_journal
from espalier_local.bench.speculate.report import BEGIN, END, as_markdown, as_text, write_docs
from espalier_local.bench.speculate.results import Results
from espalier_local.bench.speculate.statistics import bootstrap, sheet
from espalier_local.bench.speculate.tables import by_batch, by_category, by_ssm, pooled
from espalier_local.bench.speculate.totals import StepTotals, read_totals, totals
from espalier_local.cli import main
from espalier_local.client import Ask
from espalier_local.options import system_config
from treecore.errors import ConfigError, Unavailable
from treecore.testing.tiny import save_random_llama

ONE = ("ssm",)
SHAPES = Shapes(depth=2, wide_level=1, widths=(2, 3), others=((2,),))
EVERYTHING = configurations(Cast("ssm", ("i1", "i2"), ("b1", "b2"), "suffix"), SHAPES)
SETUP = Setup("llm", ("ssm", "b1", "b2"), "float32", 1, "1 core of wood", 64, 1, EVERYTHING, ("x: no SSM x runs",))


PAGE = """# HELP espalier_steps_total LLM steps
espalier_steps_total 10.0
espalier_draft_tokens_total 40.0
espalier_step_part_seconds_sum{part="draft"} 0.05
espalier_step_part_seconds_sum{part="verify"} 0.2
espalier_trees_total{drafted="ahead"} 6.0
espalier_trees_total{drafted="in_step"} 2.0
espalier_ssm_draft_tokens_total{ssm="b1"} 30.0
espalier_ssm_accepted_tokens_total{ssm="b1"} 12.0
espalier_ssm_draft_tokens_total{ssm="ssm"} 10.0
"""


def run_of(*answers: tuple[int, int, float], totals: StepTotals | None = None, checksum: int = 7) -> Run:
    """A run whose answers are (tokens, steps, ms per token)."""
    decoded = tuple(Decoded(tokens, steps, ms, checksum) for tokens, steps, ms in answers)
    return Run(decoded, totals or StepTotals())


def round_of(prompt_id: str, category: str = "qa", temperature: float = 0.0, **runs: Run) -> Round:
    """A round of one prompt."""
    return Round(temperature, (prompt_id,), (category,), runs)


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


def recorded() -> list[Round]:
    """Two categories, two temperatures, batches of one and two; the wider, the more tokens a step and ms a token."""
    speeds = {"incremental": (1, 40.0), "sequence <1,1>": (2, 30.0), "tree <2,1>": (3, 25.0), "tree <3,1>": (4, 45.0),
              "tree <2>": (2, 36.0), BOOSTED: (3, 28.0), DYNAMIC: (3, 20.0), AHEAD: (3, 16.0)}  # fmt: skip

    def runs(batch: int) -> dict[str, Run]:
        steps = totals(PAGE)
        return {
            name: run_of(*[(25, 1 + 24 // per_step, ms * batch) for _ in range(batch)], totals=steps)
            for name, (per_step, ms) in speeds.items()
            if batch == 1 or name != BOOSTED
        }

    prompts = (("p0", "qa"), ("p1", "qa"), ("p2", "rag"), ("p3", "rag"))
    alone = [Round(heat, (name,), (kind,), runs(1)) for heat in (0.0, 0.8) for name, kind in prompts]
    return [*alone, Round(0.0, ("p0", "p2"), ("qa", "rag"), runs(2))]


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


# -- journal ----------------------------------------------------------------------------------------------------------


def test_a_journal_reads_what_it_wrote(tmp_path: Path) -> None:
    """Every field."""
    journal = Journal(tmp_path / "run.jsonl", SETUP)
    for each in recorded():
        journal.add(each)
    assert read_journal(tmp_path / "run.jsonl") == (SETUP, recorded())


@settings(max_examples=25)
@given(st.floats(0, 1))
def test_a_kill_costs_the_round_in_progress(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    """Cut anywhere behind the setup: whole rounds stay, and the run goes on to the same file."""
    path = tmp_path_factory.mktemp("journal") / "run.jsonl"
    rounds = recorded()[:3]
    journal = Journal(path, SETUP)
    setup_len = path.stat().st_size
    for each in rounds:
        journal.add(each)
    whole = path.read_bytes()
    cut = setup_len + round(share * (len(whole) - setup_len))
    path.write_bytes(whole[:cut])
    resumed = Journal(path, SETUP)
    assert resumed.rounds == rounds[: whole[:cut].count(b"\n") - 1]
    for each in rounds[len(resumed.rounds) :]:
        resumed.add(each)
    assert path.read_bytes() == whole


def test_a_journal_of_another_setup_is_refused(tmp_path: Path) -> None:
    """Its rounds could not be compared; the message says what differs. Nor is any other file one."""
    path = tmp_path / "run.jsonl"
    Journal(path, SETUP)
    other = Setup("llm", SETUP.ssms, "bfloat16", 1, SETUP.cpu, 64, 1, (Configuration("incremental"),))
    with pytest.raises(ConfigError, match=r"dtype, configurations, left_out"):
        Journal(path, other)
    for text in ("", "[]\n", "{}\n", "x\n", '{"version": 2}\n'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no file of"):
            read_journal(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_journal(tmp_path / "nothing")


# -- report -----------------------------------------------------------------------------------------------------------


def test_the_page_keeps_its_prose_and_gets_the_figures(tmp_path: Path) -> None:
    """Written twice it is the same, bytes of the plots included; the plots are XML with a curve's name in them."""
    page = tmp_path / "speculation.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\nafter\n")
    hashes = []
    for _ in range(2):
        write_docs(RESULTS, page)
        files = [page, *sorted((tmp_path / "speculation").iterdir())]
        hashes.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert hashes[0] == hashes[1]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "x: no SSM x runs" in text
    for name in ("tokens_per_step.svg", "width.svg", "batch.svg"):
        svg = (tmp_path / "speculation" / name).read_text()
        assert f"(speculation/{name})" in text
        assert len(svg) < 60_000
        assert "greedy" in "".join(ET.fromstring(svg).itertext())


def test_markdown_tables_have_as_many_cells_as_their_heads() -> None:
    """Else a page shows rubbish."""
    lines = [line for line in as_markdown(RESULTS, []).splitlines() if line.startswith("|")]
    blocks = "\n".join(as_markdown(RESULTS, []).splitlines()).split("\n\n")
    assert len(lines) > 40
    for block in (block.splitlines() for block in blocks if block.startswith("|")):
        assert len({line.count("|") for line in block}) == 1


def test_the_text_has_all_tables() -> None:
    """Goals first, what was left out last."""
    text = as_text(RESULTS)
    assert text.startswith("Goals\n")
    assert text.endswith("left out: x: no SSM x runs")
    assert text.count("\n\n") == 10  # two pooled, two by SSM, one by batch, four by category


def test_a_page_without_a_section_is_refused(tmp_path: Path) -> None:
    """Nothing is written over."""
    page = tmp_path / "page.md"
    page.write_text("mine")
    with pytest.raises(ConfigError, match="no page with one section"):
        write_docs(RESULTS, page)
    assert page.read_text() == "mine"


# -- metrics, flags and the whole -------------------------------------------------------------------------------------


async def test_totals_come_from_the_metrics() -> None:
    """Means of steps; a page without them is told so, and a counter that nothing was counted in is 0."""
    found = totals(PAGE)
    assert (found.nodes_per_step, found.draft_ms, found.verify_ms, found.hidden_share) == (4, 5, 20, 0.75)
    assert (found.nodes_per_step_of("b1"), found.accepted_share_of("b1")) == (3, 0.4)
    assert (found.accepted_share_of("ssm"), found.accepted_share_of("b2")) == (0, None)
    assert (found + found).since(found) == found
    assert found.since(StepTotals()) == found
    assert StepTotals().hidden_share is None
    for body in ("espalier_draft_tokens_total 7.0\n", "<html>"):
        transport = httpx.MockTransport(lambda _request, body=body: httpx.Response(200, text=body))
        async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as client:
            with pytest.raises(Unavailable, match="no metrics"):
                await read_totals(client)


class Gateway:
    """Answers every request with three tokens in two steps; each adds a step of 4 nodes. asked: in order."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Respond."""
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "llm"}]})
        if request.url.path == "/metrics":
            count = len(self.asked)
            return httpx.Response(200, text=f"espalier_steps_total {count}\nespalier_draft_tokens_total {4 * count}\n")
        self.asked.append(json.loads(request.content))
        choices = [{"delta": {"content": "word"}, "finish_reason": "length"}]
        told = {"steps": 2, "token_ids": [[1, 2, 3]]}
        event = {"choices": choices, "espalier": told, "usage": {"completion_tokens": 3}}
        return httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")


async def test_a_round_fills_the_caches_then_asks_each_way_beginning_with_another(tmp_path: Path) -> None:
    """Of a batch, all prompts in each way; what the journal has already is not asked again."""
    ways = (INCREMENTAL, Configuration("a", ONE, (1,)), Configuration("b", ONE, (2,), at_every_batch=False))
    setup = dataclasses.replace(SETUP, configurations=ways)
    gateway, counted = Gateway(), []
    cases = read_cases([], 3)
    wanted = batches(cases, 2, (2,))
    async with httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(gateway)) as client:
        journal = Journal(tmp_path / "run.jsonl", setup)
        await Measurement(client, journal, counted.append).run(wanted, [0.8])
        asked = [(body["max_tokens"], body["espalier"].get("tree")) for body in gateway.asked]
        fill = (2, None)
        none, one, two = (64, None), (64, [1]), (64, [2])
        assert asked == [
            *(fill, none, one, two), *(fill, one, two, none), *(fill, two, none, one),
            *(fill, fill, one, one, none, none),
        ]  # fmt: skip
        assert sum(counted) == 3 * 3 + 2 * 2
        assert [list(each.runs) for each in journal.rounds] == [["incremental", "a", "b"]] * 3 + [["incremental", "a"]]
        assert {body["temperature"] for body in gateway.asked} == {0.8}
        await Measurement(client, Journal(tmp_path / "run.jsonl", setup), counted.append).run(wanted, [0.8])
        assert (len(gateway.asked), sum(counted)) == (len(asked), 26)
    run = journal.rounds[-1].runs["a"]
    assert [(answer.num_tokens, answer.num_steps) for answer in run.answers] == [(3, 2)] * 2


def parsed(*flags: str) -> argparse.Namespace:
    """The benchmark's command line."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(flags)


def test_flags_and_their_defaults() -> None:
    """Lists may be empty; a tree is widths."""
    args = parsed("speculate")
    assert (args.num_prompts, args.max_tokens, args.temperature, args.batch) == (60, 128, [0.0, 0.8], [])
    assert (args.depth, args.width, args.compare_tree) == (3, [2, 3, 4, 5], [(2,)])
    args = parsed("speculate", "--compare-tree", "--width", "--batch", "2", "4", "--boosted", "a", "b")
    assert (args.compare_tree, args.width, args.batch, args.boosted) == ([], [], [2, 4], ["a", "b"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--depth", "2", "--wide-level", "3"), "--wide-level 3"),
        (("--num-prompts", "3", "--batch", "4"), "--batch 4: only 3"),
    ],
)
def test_what_cannot_be_is_refused_before_a_system_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    """In one line."""
    llm = save_random_llama(tmp_path / "llm", num_layers=1, seed=0)
    assert main(["bench", "speculate", "--model", str(llm), "--ssm", "none", *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_real_run_is_resumed_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny system whose SSM is the LLM itself: what an earlier run has measured stays as it is."""
    llm = save_random_llama(tmp_path / "llm", num_layers=1, seed=0)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}>"
    (llm / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    prompts, file = tmp_path / "p.jsonl", tmp_path / "run.jsonl"
    prompts.write_text('{"prompt": "Hi", "category": "a"}\n{"prompt": "Ho", "category": "b"}\n')
    system = ["--model", str(llm), "--ssm", str(llm), "--threads", "1", "--json", str(file)]
    asked = ["--prompts", str(prompts), "--max-tokens", "9", "--temperature", "0.8", "--batch", "2"]
    command = ["bench", "speculate", *system, *asked, "--depth", "2", "--width", "2"]
    args = parsed(*command[1:])
    setup = setup_of(args, system_config(args))
    earlier = Round(0.8, ("p-0",), ("a",), {each.name: run_of((9, 9, 1.0)) for each in setup.configurations})
    Journal(file, setup).add(earlier)
    assert main(command) == 0
    assert capsys.readouterr().out == as_text(Results(*read_journal(file))) + "\n"
    _, (first, second, both) = read_journal(file)
    assert (first, second.prompt_ids, both.prompt_ids) == (earlier, ("p-1",), ("p-0", "p-1"))
    found = sheet([second])
    assert found is not None
    assert found.same_output == found.num_prompts == 1
    assert found.columns["sequence <1,1>"].tokens_per_step.value > 2  # the SSM is always right
    assert found.columns["incremental"].totals.nodes_per_step == 0
    assert main(["bench", "speculate-report", str(file)]) == 0
    assert capsys.readouterr().out == as_text(Results(setup, [first, second, both])) + "\n"
