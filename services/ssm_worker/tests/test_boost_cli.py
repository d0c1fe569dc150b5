"""The command line: what it says when something is wrong, dialogues that the LLM writes itself, and the report."""

from pathlib import Path

import numpy as np
import pytest

from ssm_worker.boost.boosting import Round
from ssm_worker.boost.checkpoint import Mark, TrainingLog
from ssm_worker.boost.cli import main
from ssm_worker.boost.corpus import Corpus, shard_path
from ssm_worker.boost.report import Artefact, Guesses, Speed, render_report
from ssm_worker.boost.testing import random_sequences, write_tiny_teacher

ARTEFACTS = [Artefact(4, 16384, 28_300_000, 2.0), Artefact(2, 8192, 14_000_000, 1.0)]
SPEED = Speed("tiny", 14.0, 1)


def test_dialogues_are_written_and_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the same command, and nothing is done twice; their answers serve as passages of prompts."""
    llm = write_tiny_teacher(tmp_path / "llm", num_hidden_layers=5)
    common = ["--llm", str(llm), "--run", str(tmp_path / "run")]
    for _ in range(2):
        assert main(["generate", *common, "--tokens", "50", "--max-prompt-len", "5", "--max-answer-len", "8"]) == 0
        assert main([*common, "--passes", "1e-9", "--head-rows", "60"]) == 0
    assert [path.name for path in (tmp_path / "run" / "corpus").glob("*.npz")] == [shard_path(tmp_path, 0, 0).name]
    assert (tmp_path / "run" / "ssm-1" / "artefact" / "config.json").exists()
    assert "Agreement" not in capsys.readouterr().out
    assert main(["prompts", "--count", "5", "--passages-from", str(tmp_path / "run"), "--llm", str(llm)]) == 0


@pytest.mark.parametrize("command", [["generate"], ["complete", "--prompts", "x.jsonl"], []])
def test_a_missing_llm_is_one_line(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """And exit status 1, no traceback."""
    assert main([*command, "--llm", str(tmp_path / "absent"), "--run", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "absent" in error


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-ssms", "0"],
        ["--seed", "-1"],
        ["--rows", "x"],
        ["--passe", "5"],
        ["--covered-weight", "2"],
        ["--shape", "1,2"],
        ["--learning-rate", "nan"],
        ["--temperatures", "0.5,0"],
        ["--unit", "word"],
    ],
)
def test_bad_flags_are_refused(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By argparse, naming the flag; abbreviations are no flags."""
    with pytest.raises(SystemExit):
        main(["--llm", str(tmp_path), "--run", str(tmp_path), *flags])
    assert flags[0] in capsys.readouterr().err


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """And is not taken for the boosting's."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert {"prompts", "complete", "generate", "measure"} <= set(capsys.readouterr().out.split())


def test_prompts_that_are_all_too_long_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With how many were left out."""
    llm = write_tiny_teacher(tmp_path / "llm")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcdef"}\n' * 3)
    argv = ["complete", "--llm", str(llm), "--run", str(tmp_path), "--prompts", str(prompts), "--max-prompt-len", "5"]
    assert main(argv) == 1
    assert capsys.readouterr().err.startswith("3 prompts of more than 5 tokens are left out\nerror: ")


def test_the_report_says_all_numbers() -> None:
    """Tokens, times, sizes, ratio, coverage, agreement; histories are thinned and end with the last mark."""
    corpus = Corpus(random_sequences(10, 40), 3725.0)
    marks = tuple(
        Mark(100 * number, 5000 * number, 61.0 * number, 2.5, (0.441, 0.5, 0.6, 0.65, 0.68)) for number in range(1, 48)
    )
    rounds = [Round(TrainingLog({"start": "layers 0,3"}, "", marks), 10, 1, 200, 88)] * 2
    ranks = [np.array([0, 1, 9, 40]), np.array([3, 0, 9, 0])]
    text = render_report(corpus, rounds, ARTEFACTS, SPEED, Guesses(ranks, ranks, 0.8))
    for words in (
        f"| the LLM's tokens | {corpus.num_tokens:,} |",
        "| 1 h 02 min |",
        "| 1 | layers 0,3 | 10 | 1 (10.0%) | 200 | 88 (44.0%) | 235,000 | 47 min 47 s | 2.500 |",
        "| 2 | 2 | 8,192 | 14.0 | 1.0 | 14.0x |",
        "| SSM 1 | 25.0% | 50.0% | 50.0% | 50.0% | 50.0% |",
        "| SSMs 1 to 2, merged | 75.0% | 75.0% | 75.0% | 75.0% | 75.0% |",
        "| SSM 1, 2 times the guesses | 50.0% | 50.0% | 50.0% | 50.0% | 75.0% |",
        "| 4,700 | 235,000 | 47 min 47 s | 2.500 | 44.1/50.0/60.0/65.0/68.0 |",
    ):
        assert words in text
    assert len(text.split("## History of SSM 2")[1].strip().splitlines()) <= 2 + 20
    assert "greedy\n" not in render_report(corpus, rounds, ARTEFACTS, SPEED, None)
