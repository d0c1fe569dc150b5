"""SmolLM2 and its shipped SSM, through the command that users type (the large set: `espalier bench identity`)."""

import json

import pytest

from espalier_local.cli import main

pytestmark = pytest.mark.weights


def test_on_equals_off_equals_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy and sampled, fp32, token for token; transformers is the independent oracle."""
    assert main(["bench", "identity", "--num-prompts", "3", "--max-tokens", "24", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("3/3 prompts identical" in line for line in lines)


def test_generate_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """The fields that scripts rely on; the shipped SSM makes steps yield more than one token."""
    ask = ["generate", "List three fruits.", "--chat", "--json", "--max-tokens", "48", "--threads", "1"]
    assert main(ask) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {
        *("text", "token_ids", "finish_reason", "seed", "steps", "tokens_per_step", "ms_per_token"),
    }
    assert answer["steps"] < len(answer["token_ids"])
    assert answer["tokens_per_step"] == pytest.approx(len(answer["token_ids"]) / answer["steps"], abs=0.01)
