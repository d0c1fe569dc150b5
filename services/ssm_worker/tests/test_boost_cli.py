"""The command line, from nothing to a report; and what it says when something is wrong."""

import json
from pathlib import Path

import pytest

from ssm_worker.boost.checkpoint import Mark, TrainingLog
from ssm_worker.boost.cli import main
from ssm_worker.boost.corpus import Corpus, shard_path
from ssm_worker.boost.report import Artefact, render_report
from ssm_worker.boost.testing import random_sequences, write_tiny_teacher
from treecore.model.load import load_decoder

ARTEFACT = Artefact("tiny", 4, 30, 16384, 49152, 28_300_000, 2.0, 14.0)


def test_from_nothing_to_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All four commands on a tiny teacher; each again, and nothing is done twice."""
    teacher = write_tiny_teacher(tmp_path / "teacher", num_hidden_layers=5)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Why is {number}?"}) + "\n" for number in range(6)))
    common = ["--teacher", str(teacher), "--run", str(tmp_path / "run")]
    assert main(["held-out", *common, "--prompts", str(prompts), "--count", "3"]) == 0
    for _ in range(2):
        assert main(["generate", *common, "--tokens", "50", "--max-prompt-len", "5", "--max-answer-len", "8"]) == 0
        assert main(["train", *common, "--passes", "0.5", "--head-rows", "60", "--checkpoint-steps", "2"]) == 0
    assert [path.name for path in (tmp_path / "run" / "corpus").iterdir()] == [shard_path(tmp_path, 0, 0).name]
    assert load_decoder(tmp_path / "run" / "artefact", dtype="float32", embedding_from=teacher).spec.num_layers == 4
    capsys.readouterr()
    assert main(["report", *common]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "run" / "report.md").read_text()
    for words in ("| held-out agreement top-5 |", "| layers | 4 of 5 |", "| speed ratio |", "## History"):
        assert words in printed
    assert main(["held-out", *common, "--prompts", str(prompts), "--count", "3"]) == 1
    assert "held-out.npz: is there already" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "train", "report"])
def test_a_missing_teacher_is_one_line(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And exit status 1, no traceback."""
    assert main([command, "--teacher", str(tmp_path / "absent"), "--run", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "absent" in error


@pytest.mark.parametrize(
    "flags",
    [["--tokens", "0"], ["--seed", "-1"], ["--rows", "x"], ["--token", "5"]],
)
def test_bad_flags_are_refused(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By argparse, naming the flag; abbreviations are no flags."""
    with pytest.raises(SystemExit):
        main(["generate", "--teacher", str(tmp_path), "--run", str(tmp_path), *flags])
    assert flags[0] in capsys.readouterr().err


def test_the_report_says_all_numbers() -> None:
    """Tokens, times, sizes, ratio; the history is thinned and ends with the last mark."""
    corpus = Corpus(random_sequences(10, 40), 3725.0)
    marks = tuple(
        Mark(100 * number, 5000 * number, 61.0 * number, 2.5, (0.441, 0.5, 0.6, 0.65, 0.68)) for number in range(1, 48)
    )
    text = render_report(ARTEFACT, corpus, TrainingLog({}, "", marks), None, 1)
    for words in (
        f"| teacher tokens | {corpus.num_tokens:,} |",
        "| 1 h 02 min |",
        "| optimiser steps | 4,700 |",
        "| artefact size | 28.3 MB |",
        "| speed ratio | 7.0x |",
        "| 4,700 | 235,000 | 47 min 47 s | 2.500 | 44.1/50.0/60.0/65.0/68.0 |",
    ):
        assert words in text
    assert len(text.split("## History")[1].strip().splitlines()) <= 2 + 20


def test_a_report_without_training_or_held_out_set_leaves_their_lines_out() -> None:
    """An artefact may have been trained elsewhere."""
    text = render_report(ARTEFACT, Corpus(random_sequences(2, 40), 1.0), None, None, 2)
    assert "steps" not in text
    assert "agreement" not in text
    assert "2 threads" in text
