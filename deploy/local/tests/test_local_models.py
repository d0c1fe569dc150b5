"""What --model and --ssm mean."""

from pathlib import Path

import pytest

from espalier_local import models
from espalier_local.cache import ModelCache
from espalier_local.models import SMOLLM2, ServedModel, resolve_model, resolve_ssms
from treecore.errors import ConfigError

LLM = ServedModel("llm", Path("/models/llm"))


def no_report(_stage: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


def checkpoint(directory: Path) -> Path:
    """A directory that looks like a checkpoint."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_a_known_model_that_is_not_here_names_the_command(tmp_path) -> None:
    """The way out is in the message."""
    with pytest.raises(ConfigError, match="fetch it with: espalier models fetch smollm2-135m-instruct"):
        resolve_model(SMOLLM2.name, ModelCache(tmp_path), no_report)


def test_a_known_model_is_served_from_the_cache_under_its_name(tmp_path) -> None:
    """Not under its directory's name."""
    directory = checkpoint(tmp_path / "models" / SMOLLM2.name)
    assert resolve_model(SMOLLM2.name, ModelCache(tmp_path), no_report) == ServedModel(SMOLLM2.name, directory)


def test_a_directory_is_served_under_its_own_name(tmp_path) -> None:
    """With and without a slash at its end."""
    directory = checkpoint(tmp_path / "my-llama")
    assert resolve_model(f"{directory}/", ModelCache(tmp_path), no_report) == ServedModel("my-llama", directory)


def test_a_gguf_file_is_converted_once(tmp_path, monkeypatch) -> None:
    """The second time its checkpoint directory is found by the file's hash."""
    converted = []

    def convert(gguf: Path, out_dir: Path, report: models.Report) -> None:
        converted.append(gguf)
        checkpoint(out_dir)

    monkeypatch.setattr(models, "convert", convert)
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    cache = ModelCache(tmp_path / "cache")
    first, second = (resolve_model(str(gguf), cache, no_report) for _ in range(2))
    assert first == second
    assert first.name == "tiny"
    assert (first.directory / "config.json").is_file()
    assert converted == [gguf]


@pytest.mark.parametrize("wanted", ["nothing", "/no/such/directory", "a/b/c", ""])
def test_what_is_no_model_is_told_in_one_line(tmp_path, monkeypatch, wanted) -> None:
    """It names all that would have been one; an empty name is not the current directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="neither a checkpoint directory") as caught:
        resolve_model(wanted, ModelCache(tmp_path), no_report)
    assert "\n" not in str(caught.value)


def test_none_means_no_ssm_and_excludes_others(tmp_path) -> None:
    """A contradiction is refused."""
    assert resolve_ssms(["none"], LLM) == ()
    with pytest.raises(ConfigError, match="excludes"):
        resolve_ssms(["none", str(checkpoint(tmp_path / "draft"))], LLM)


def test_a_model_without_a_shipped_ssm_has_none_by_default() -> None:
    """It decodes incrementally."""
    assert resolve_ssms(["default"], LLM) == ()


def test_ssms_of_one_name_get_different_ones(tmp_path) -> None:
    """Announcements and logs tell them apart."""
    directories = [checkpoint(tmp_path / str(idx) / "draft") for idx in range(3)]
    names = [ssm.name for ssm in resolve_ssms([str(each) for each in directories], LLM)]
    assert names == ["draft", "draft-2", "draft-3"]


def test_a_directory_without_a_config_is_no_ssm(tmp_path) -> None:
    """One line."""
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        resolve_ssms([str(tmp_path)], LLM)


def test_suffix_is_an_ssm_of_the_llms_own_directory(tmp_path, monkeypatch) -> None:
    """Alone, with a corpus, and beside others; a corpus that is not there is told in one line."""
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path)
    draft = checkpoint(tmp_path / "draft")
    assert resolve_ssms(["suffix", str(draft), "suffix:texts.jsonl"], LLM) == (
        ServedModel("suffix", LLM.directory, "suffix"),
        ServedModel("draft", draft),
        ServedModel("suffix-2", LLM.directory, "suffix", corpus),
    )
    with pytest.raises(ConfigError, match="no such file"):
        resolve_ssms(["suffix:nothing.jsonl"], LLM)
