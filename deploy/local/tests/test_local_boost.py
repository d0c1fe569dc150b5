"""`espalier boost` hands its flags on, and knows what a model's name means."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from espalier_local.boost import with_directory
from espalier_local.cli import main
from treecore.testing.checkpoints import write_tiny_llama


def test_the_llm_becomes_its_directory(tmp_path: Path) -> None:
    """Wherever it stands; all else is left as it is, and without it nothing is added."""
    model = write_tiny_llama(tmp_path / "tiny")
    assert with_directory(["complete", f"--llm={model}", "--rows", "3"]) == [
        *("complete", "--rows", "3", "--llm", str(model))
    ]
    assert with_directory(["--num-ssms", "2", "--help"]) == ["--num-ssms", "2", "--help"]


def test_an_unknown_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the trainer starts."""
    assert main(["boost", "--llm", "/no/such/model", "--run", str(tmp_path)]) == 1
    assert "neither a checkpoint directory" in capsys.readouterr().err


def test_the_trainers_commands_are_the_products() -> None:
    """Its output and its exit status are ours."""
    command = [sys.executable, "-m", "espalier_local", "boost"]
    done = subprocess.run(
        [*command, "prompts", "--count", "3"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert len({json.loads(line)["prompt"] for line in done.stdout.splitlines()}) == 3
    refused = subprocess.run([*command, "--num-ssms", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "--num-ssms" in refused.stderr
