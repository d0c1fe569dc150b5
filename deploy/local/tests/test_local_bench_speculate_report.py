"""`espalier bench speculate`: the journal, the report, the metrics that it reads, and a whole run."""

import argparse
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_local.bench.prompts import read_cases
from espalier_local.bench.speculate.command import add_parser, setup_of
from espalier_local.bench.speculate.configurations import (
    INCREMENTAL,
    Configuration,
)
from espalier_local.bench.speculate.measure import Measurement, batches
from espalier_local.bench.speculate.records import Journal, Round, Setup, read_journal
from espalier_local.bench.speculate.report import BEGIN, END, as_markdown, as_text, write_docs
from espalier_local.bench.speculate.results import Results
from espalier_local.bench.speculate.statistics import sheet
from espalier_local.bench.speculate.testing import PAGE, SETUP, recorded, run_of
from espalier_local.bench.speculate.totals import StepTotals, read_totals, totals
from espalier_local.cli import main
from espalier_local.options import system_config
from treecore.errors import ConfigError, Unavailable
from treecore.testing.tiny import save_random_llama

ONE = ("ssm",)
RESULTS = Results(SETUP, recorded())


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


OVERLAPPING = """espalier_steps_total 10.0
espalier_step_part_seconds_sum{part="draft"} 0.05
espalier_step_part_seconds_sum{part="verify"} 0.2
espalier_step_part_seconds_sum{part="draft_forward"} 0.02
espalier_step_part_seconds_sum{part="verify_forward"} 0.15
"""  # as journals of November 2026 have it


async def test_totals_come_from_the_metrics() -> None:
    """Means of steps; a page without them is told so, and a counter that nothing was counted in is 0."""
    found = totals(PAGE)
    assert (found.nodes_per_step, found.hidden_share) == (4, 0.75)
    assert (found.draft_ms, found.verify_ms) == pytest.approx((5, 20))
    assert (found.nodes_per_step_of("b1"), found.accepted_share_of("b1")) == (3, 0.4)
    assert (found.accepted_share_of("ssm"), found.accepted_share_of("b2")) == (0, None)
    earlier = totals(OVERLAPPING)
    assert (earlier.draft_ms, earlier.verify_ms) == pytest.approx((5, 20))
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
