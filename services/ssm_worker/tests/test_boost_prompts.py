"""Prompts out of templates: many, different, repeatable; and the record that keeps a seed's text of one kind."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssm_worker.boost.cli import main
from ssm_worker.boost.prompts import (
    MAX_PASSAGE_LEN,
    MIN_PASSAGE_LEN,
    PromptSource,
    distinct_prompts,
    read_subjects,
    read_templates,
    shipped_source,
)
from ssm_worker.boost.record import keep_record
from treecore.errors import ConfigError

PASSAGE = "A sentence of the passage. " * 40


def test_subjects_and_templates_are_read() -> None:
    """Comments and empty lines are none; a backslash-n is a line break."""
    assert read_templates("# no\n\nWhy {thing}?\\n\\n{text}\n") == ["Why {thing}?\n\n{text}"]
    assert read_subjects("# no\n[thing]\na cup\n\n[place]\nRome\nOslo\n") == {
        "thing": ["a cup"],
        "place": ["Rome", "Oslo"],
    }


def test_every_shipped_template_can_be_filled() -> None:
    """Each slot is a kind that has subjects, a number or a passage; without passages none asks for one."""
    source = shipped_source([PASSAGE])
    slots = {slot for template in source.templates for slot in re.findall(r"\{(\w+)\}", template)}
    assert slots - {"n", "text"} == source.subjects.keys()
    assert all(source.subjects.values())
    assert "text" in slots
    assert not any("{text}" in template for template in shipped_source(["too short"]).templates)


@given(seed=st.integers(0, 2**31), count=st.integers(1, 80))
def test_prompts_are_different_and_a_function_of_the_seed(seed: int, count: int) -> None:
    """No braces are left; asked for fewer, the same ones come first."""
    source = shipped_source([PASSAGE])
    prompts = list(distinct_prompts(source, count, seed))
    assert len(set(prompts)) == count
    assert not any(re.search(r"[{}]", prompt) for prompt in prompts)
    assert list(distinct_prompts(source, count // 2, seed)) == prompts[: count // 2]


def test_a_passage_is_cut_behind_a_sentence() -> None:
    """And is neither very short nor very long."""
    source = PromptSource(["{text}"], {}, [PASSAGE])
    for prompt in distinct_prompts(source, 15, 0):
        assert MIN_PASSAGE_LEN // 2 < len(prompt) <= MAX_PASSAGE_LEN
        assert prompt.lower().rstrip(".").endswith("of the passage")


def test_an_exhausted_source_is_said() -> None:
    """After a thousand prompts in vain, with how many there are."""
    source = PromptSource(["{thing}"], {"thing": ["one", "two"]}, [])
    with pytest.raises(ConfigError, match="gave 2 different"):
        list(distinct_prompts(source, 3, 0))


def test_the_command_prints_a_prompt_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `complete` and `run` read them; passages from files are used."""
    passages = tmp_path / "passages.txt"
    passages.write_text("Short.\n\n" + "Zyzzyva is a word. " * 30)
    assert main(["prompts", "--count", "60", "--seed", "3", "--passages", str(passages)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) == 60
    assert any("zyzzyva" in line.lower() for line in lines)
    assert main(["prompts", "--count", "1", "--passages-from", str(tmp_path)]) == 1
    assert "--llm" in capsys.readouterr().err


def test_a_seed_goes_on_as_it_began(tmp_path: Path) -> None:
    """The same settings again are fine; another value, a corrupt record, or shards without one are refused by name."""
    keep_record(tmp_path, 3, {"rows": 4, "temperatures": (0.5, 1.0)})
    keep_record(tmp_path, 3, {"rows": 4, "temperatures": (0.5, 1.0)})
    keep_record(tmp_path, 4, {"rows": 5})
    with pytest.raises(ConfigError, match=r"seed3\.json: .* another rows"):
        keep_record(tmp_path, 3, {"rows": 5, "temperatures": (0.5, 1.0)})
    (tmp_path / "seed3.json").write_text("{")
    with pytest.raises(ConfigError, match=r"seed3\.json: corrupt"):
        keep_record(tmp_path, 3, {"rows": 4})
    (tmp_path / "seed5-00000.npz").touch()
    with pytest.raises(ConfigError, match=r"seed5\.json: missing"):
        keep_record(tmp_path, 5, {"rows": 4})
