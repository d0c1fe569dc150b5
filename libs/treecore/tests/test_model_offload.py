"""Offload: streamed layers compute what resident ones do, bit by bit, in less memory than they take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.errors import ConfigError
from treecore.model import linear
from treecore.model.backend import Hardware, OffloadName
from treecore.model.batch import ForwardBatch
from treecore.model.checkpoint import SafetensorsCheckpoint
from treecore.model.held import Forwards
from treecore.model.linear import PlainLinear
from treecore.model.load import load_decoder
from treecore.model.sequence import SequenceCache
from treecore.model.uncached import UncachedCheckpoint
from treecore.testing.checkpoints import write_tiny_llama
from treecore.testing.families import CASES, write_family
from treecore.testing.ranks import ThreadGroup

TREE = ([7, 8, 9, 7, 5], [0, 0, 1, 1, 2])
DISK = Hardware(offload="disk")


def steps(decoder: Forwards, num_steps: int = 3) -> torch.Tensor:
    """Logits of a prefill with a tree, and of more trees behind it."""
    pool = decoder.new_pool(256)
    cache, logits = SequenceCache(pool, block_len=16), []
    for step in range(num_steps):
        cache.advance("a", 0, list(range(3, 20 + step)))
        cache.extend("a", *TREE)
        segment = cache.next_segment("a")
        logits.append(decoder.forward(ForwardBatch.from_segments([segment]), pool))
        cache.mark_written("a", segment.num_rows)
    return torch.cat(logits)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident linears are torch's own, as streamed ones are: else FBGEMM rounds otherwise."""
    monkeypatch.setattr(linear, "_packings", lambda _precision: (PlainLinear,))


@pytest.mark.parametrize("num_resident", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_streamed_layers_give_the_same_bits(plain: None, tmp_path: Path, case: str, num_resident: int) -> None:
    """Of every family; three, two and one of three layers stream, so that slots change places between forwards."""
    path = write_family(tmp_path, case)
    on = Hardware(offload="disk", offload_resident_layers=num_resident)
    assert torch.equal(steps(load_decoder(path, dtype="float32", on=on)), steps(load_decoder(path, dtype="float32")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_streamed_weights_are_rounded_as_resident_ones(plain: None, tmp_path: Path, dtype: linear.DType) -> None:
    """From fp32 on disk."""
    path = write_tiny_llama(tmp_path)
    assert torch.equal(steps(load_decoder(path, dtype=dtype, on=DISK)), steps(load_decoder(path, dtype=dtype)))


def test_streamed_layers_are_near_packed_ones(tmp_path: Path) -> None:
    """The other kernels of the default mode round otherwise, and no more."""
    path = write_tiny_llama(tmp_path, dtype=torch.float16, tie_word_embeddings=False)
    streamed, packed = (steps(load_decoder(path, dtype="float32", on=on)) for on in (DISK, Hardware()))
    torch.testing.assert_close(streamed, packed, rtol=0, atol=1e-4)


def test_a_stage_of_two_ranks_streams(plain: None, tmp_path: Path) -> None:
    """Each reads its rows and columns, and the stages their layers."""
    path = write_family(tmp_path, "qwen2")
    groups = [ThreadGroup(path, 2, 2, dtype="float32", on=on) for on in (DISK, Hardware())]
    try:
        assert torch.equal(*(steps(group) for group in groups))
    finally:
        for group in groups:
            group.close()


def test_batch_invariant_layers_stream(tmp_path: Path) -> None:
    """Rows one by one and all at once."""
    on = Hardware(offload="disk", batch_invariant=True)
    decoder = load_decoder(write_family(tmp_path, "llama"), dtype="float32", on=on)
    pool = decoder.new_pool(256)
    cache, rows = SequenceCache(pool, block_len=16), []
    for name, max_rows in (("alone", 1), ("together", None)):
        cache.advance(name, 0, list(range(3, 30)))
        while cache.num_pending(name):
            segment = cache.next_segment(name, max_rows)
            logits = decoder.forward(ForwardBatch.from_segments([segment]), pool)
            cache.mark_written(name, segment.num_rows)
        rows.append((logits, pool.kv[:, segment.column_slots]))
    assert all(torch.equal(*pair) for pair in zip(*rows, strict=True))


@settings(max_examples=20, deadline=None)
@given(broken_at=st.lists(st.integers(0, 4), max_size=3), num_resident=st.integers(0, 5))
def test_a_forward_that_breaks_off_harms_no_later_one(
    tmp_path_factory: pytest.TempPathFactory, broken_at: list[int], num_resident: int
) -> None:
    """Whichever layer it was at: the next one starts with the first layer, and every layer has its own weights."""
    path = tmp_path_factory.mktemp("five")
    write_tiny_llama(path, num_hidden_layers=5)
    on = Hardware(offload="disk", offload_resident_layers=num_resident)
    layers, whole = (load_decoder(path, dtype="float32", on=on)._stage.layers for on in (on, Hardware()))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    for last in broken_at:
        for layer_idx, _ in enumerate(layers):
            if layer_idx == last:
                break
    assert len(layers) == 5
    with torch.inference_mode():
        for streamed, resident in zip(layers, whole, strict=True):
            torch.testing.assert_close(streamed.up(x), resident.up(x), rtol=0, atol=1e-5)
            torch.testing.assert_close(streamed.down(x[:, :1].expand(3, 48)), resident.down(x[:, :1].expand(3, 48)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_uncached_tensors_are_those_of_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whole, and parts of them."""
    path = write_tiny_llama(tmp_path, dtype=dtype)
    ours, theirs = UncachedCheckpoint(path), SafetensorsCheckpoint(path)
    assert ours.names() == theirs.names()
    for name in ours.names():
        assert torch.equal(ours.tensor(name), theirs.tensor(name))
        assert tuple(ours.shape(name)) == tuple(theirs.shape(name))
        assert torch.equal(ours.part(name, range(3, 16)), theirs.part(name, range(3, 16)))
        if len(ours.shape(name)) == 2:
            cut = range(3, 16), range(5, 9)
            assert torch.equal(ours.part(name, *cut), theirs.part(name, *cut))


def test_what_cannot_stream_is_refused(tmp_path: Path) -> None:
    """By name, at load."""
    path = write_tiny_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match="offload cpu"):
        load_decoder(path, dtype="float32", on=Hardware(offload="cpu"))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="offload disk streams safetensors only"):
        load_decoder(tmp_path / "model.gguf", dtype="float32", on=DISK)
    weights = path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ConfigError, match="ends before its tensors do"):
        steps(load_decoder(path, dtype="float32", on=DISK))
    weights.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        load_decoder(path, dtype="float32", on=DISK)


_LIMITED = """
import resource, sys
from pathlib import Path
import torch
from treecore.model.backend import Hardware
from treecore.model.batch import ForwardBatch
from treecore.model.load import load_decoder
from treecore.model.sequence import SequenceCache

torch.set_num_threads(1)
path, offload, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.randn(64, 64) @ torch.randn(64, 64)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
decoder = load_decoder(path, dtype="float32", on=Hardware(offload=offload))
pool = decoder.new_pool(64)
cache, tokens = SequenceCache(pool, 16), [1, 2, 3]
for _ in range(4):
    cache.advance("a", 0, tokens)
    segment = cache.next_segment("a")
    logits = decoder.forward(ForwardBatch.from_segments([segment]), pool)
    cache.mark_written("a", segment.num_rows)
    tokens.append(int(logits[-1].argmax()))
print(*tokens)
"""


def generate(path: Path, offload: OffloadName, limit: int) -> "subprocess.CompletedProcess[str]":
    """Tokens by a process that may have `limit` bytes more than after its imports (0: any)."""
    command = [sys.executable, "-c", _LIMITED, str(path), offload, str(limit)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all private memory on Linux alone")
def test_a_model_larger_than_memory_runs(tmp_path: Path) -> None:
    """The kernel allows half of the model's size on top of an idle process; a resident model fails on that."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "head_dim": 64}
    path = write_tiny_llama(tmp_path, num_attention_heads=8, num_key_value_heads=4, **sizes)
    limit = (path / "model.safetensors").stat().st_size // 2
    whole, limited, resident = generate(path, "none", 0), generate(path, "disk", limit), generate(path, "none", limit)
    assert len(whole.stdout.split()) == 7, whole.stderr
    assert limited.stdout == whole.stdout, limited.stderr
    assert resident.returncode != 0
    assert resident.stdout == ""
