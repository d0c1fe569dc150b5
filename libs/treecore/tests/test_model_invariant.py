"""Batch-invariant mode: a node's logits have the same bits alone, in a tree, in a batch, and behind any prefill."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.errors import ConfigError
from treecore.model import linear, load
from treecore.model.attention_invariant import BLOCK_ROWS, TILE_LEN
from treecore.model.backend import Hardware
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.invariant import MAX_ROWS, InvariantLinear, Pack, Part, Trial, padded_row_counts
from treecore.model.linear import PlainLinear, Precision, pack_linear
from treecore.model.load import load_decoder
from treecore.model.parallel import Place
from treecore.model.sequence import SequenceCache
from treecore.testing.checkpoints import write_tiny_llama
from treecore.testing.families import CASES, write_family

CPU = torch.device("cpu")
INVARIANT = Hardware(batch_invariant=True)
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM2_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
CHAIN = ([5, 6, 7], [0, 1, 2])
TREE = ([7, 8, 9, 7, 5, 6, 8, 8, 9, 4, 4, 3], [0, 0, 1, 1, 2, 3, 3, 0, 8, 9, 10, 4])


class Requests:
    """Requests over one cache that is full of NaN: whatever reads a slot that was not written shows."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.pool = decoder.new_pool(8192)
        self.pool.kv.fill_(float("nan"))
        self.cache = SequenceCache(self.pool, block_len=16)

    def add(self, name: str, tokens: list[int], tree: tuple[list[int], list[int]] = ([], []), chunk: int = 512) -> None:
        """A request whose tokens but the last are cached, computed `chunk` rows at a time, and whose tree is not."""
        self.cache.advance(name, 0, tokens)
        while self.cache.num_pending(name) > 1:
            self.forward([name], min(chunk, self.cache.num_pending(name) - 1))
        self.cache.extend(name, *tree)

    def forward(self, names: list[str], max_rows: int | None = None) -> list[torch.Tensor]:
        """The next pending rows of each; logits of the root and the nodes among them."""
        segments = [self.cache.next_segment(name, max_rows) for name in names]
        batch = ForwardBatch.from_segments(segments)
        logits = batch.split_logits(self.decoder.forward(batch, self.pool))
        for name, segment in zip(names, segments, strict=True):
            self.cache.mark_written(name, segment.num_rows)
        return logits

    def one_by_one(self, name: str) -> torch.Tensor:
        """Root and nodes, each in a forward of its own."""
        return torch.cat([self.forward([name], 1)[0] for _ in range(self.cache.num_pending(name))])


def random_tokens(seed: int, length: int) -> list[int]:
    """Tokens of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


def path_tokens(tree: tuple[list[int], list[int]], node: int) -> list[int]:
    """The tokens from the root's child down to `node`."""
    tokens, parents = tree
    return [*path_tokens(tree, parents[node - 1]), tokens[node - 1]] if node else []


def in_four_ways(decoder: Decoder, prompt: list[int], tree: tuple[list[int], list[int]], chunk: int) -> torch.Tensor:
    """Logits [4, N, V] of a tree's nodes: each row alone, one tree, in a batch of 16, and each path incrementally."""
    requests, num_nodes = Requests(decoder), len(tree[0]) + 1
    requests.add("rows", prompt, tree)
    requests.add("tree", prompt, tree, chunk)
    requests.add("batch", prompt, tree, chunk + 3)
    others = [f"other{idx}" for idx in range(15)]
    for idx, name in enumerate(others):
        requests.add(name, random_tokens(idx, 1 + (idx * 37) % 90), CHAIN if idx % 3 else ([], []))
    for node in range(num_nodes):
        requests.add(f"path{node}", prompt + path_tokens(tree, node), chunk=chunk + 7)
    return torch.stack(
        [
            requests.one_by_one("rows"),
            requests.forward(["tree"])[0],
            requests.forward([*others[:7], "batch", *others[7:]])[7],
            torch.cat([requests.forward([f"path{node}"])[0] for node in range(num_nodes)]),
        ]
    )


def differing(ways: torch.Tensor) -> int:
    """Rows of which not all ways have the same bits."""
    return int((ways != ways[0]).any(-1).any(0).sum())


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree, siblings distinct."""
    nodes: dict[tuple[int, int], None] = {}
    for _ in range(draw(st.integers(0, 20))):
        nodes[draw(st.integers(0, len(nodes))), draw(st.integers(0, 60))] = None
    return [token for _, token in nodes], [parent for parent, _ in nodes]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """A tiny model in both modes: invariant and default."""
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_decoder(path, dtype="bfloat16", on=INVARIANT), load_decoder(path, dtype="bfloat16")


@settings(max_examples=20, deadline=None)
@given(tree=trees(), prompt_len=st.integers(1, 150), chunk=st.integers(1, 100))
def test_the_bits_of_a_node_depend_on_its_path_only(
    tiny: tuple[Decoder, Decoder], tree: tuple[list[int], list[int]], prompt_len: int, chunk: int
) -> None:
    """Whatever is computed with it, and however its prefix was cut; the numbers are those of the default mode."""
    invariant, default = tiny
    prompt = random_tokens(prompt_len, prompt_len)
    ways = in_four_ways(invariant, prompt, tree, chunk)
    assert differing(ways) == 0
    requests = Requests(default)
    requests.add("tree", prompt, tree)
    torch.testing.assert_close(ways[1], requests.forward(["tree"])[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("prompt_len", [TILE_LEN - 2, TILE_LEN, TILE_LEN + 1])
@pytest.mark.parametrize("case", CASES)
def test_every_family(tmp_path: Path, case: str, prompt_len: int) -> None:
    """Windows, soft caps, layer norms, one KV head: with a tree across the border of a tile."""
    path = write_family(tmp_path, case)
    decoder = load_decoder(path, dtype="float32", on=INVARIANT)
    prompt = random_tokens(1, prompt_len)
    ways = in_four_ways(decoder, prompt, TREE, chunk=5)
    assert differing(ways) == 0
    requests = Requests(load_decoder(path, dtype="float32"))
    requests.add("tree", prompt, TREE)
    torch.testing.assert_close(ways[1], requests.forward(["tree"])[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_layers_of_a_real_size(tmp_path: Path, stored: torch.dtype, num_threads: int, threads: None) -> None:
    """Two layers as wide as SmolLM2's, in fp32 (oneDNN) and bf16 (FBGEMM); the default mode fails this."""
    torch.set_num_threads(num_threads)
    path = write_tiny_llama(tmp_path, dtype=stored, head_dim=64, max_position_embeddings=1024, **SMOLLM2)
    prompt = random_tokens(2, 300)
    ways = in_four_ways(load_decoder(path, dtype="float32", on=INVARIANT), prompt, TREE, chunk=100)
    assert differing(ways) == 0
    assert differing(in_four_ways(load_decoder(path, dtype="float32"), prompt, TREE, chunk=100)) > 0


def test_bfloat16_activations_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU with bf16 kernels runs, but with torch's own linears."""
    bfloat16 = Precision(torch.bfloat16, torch.bfloat16, CPU, batch_invariant=True)
    monkeypatch.setattr(load, "choose_precision", lambda *_args, **_options: bfloat16)
    monkeypatch.setattr(linear, "pack_onednn", PlainLinear)
    decoder = load_decoder(write_tiny_llama(tmp_path, head_dim=64, **SMOLLM2), dtype="bfloat16", on=INVARIANT)
    assert differing(in_four_ways(decoder, random_tokens(3, 100), TREE, chunk=40)) == 0


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_long_chunk_equals_its_rows(tmp_path: Path, batch_invariant: bool) -> None:
    """A row in a chunk of 512 and alone, all positions: more rows than a part, a block or a call takes."""
    assert max(MAX_ROWS, BLOCK_ROWS, TILE_LEN) < 512
    path = write_tiny_llama(tmp_path, head_dim=64, max_position_embeddings=1024, **SMOLLM2)
    requests = Requests(load_decoder(path, dtype="bfloat16", on=Hardware(batch_invariant=batch_invariant)))
    prompt = random_tokens(4, 600)
    for name, chunk in (("long", 512), ("short", 33)):
        requests.add(name, prompt, chunk=chunk)
    long, short = (
        requests.pool.kv[:, requests.cache.next_segment(name).column_slots[:-1]] for name in ("long", "short")
    )
    assert torch.equal(long, short) == batch_invariant


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [*SMOLLM2_SHAPES, (61, 32)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_times_a_matrix_has_one_result(shape: tuple[int, int], stored: torch.dtype) -> None:
    """For all numbers of rows up to 70 and some beyond, at every place among them."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(stored)
    packed = pack_linear(weight, Precision(torch.float32, torch.float32, CPU, batch_invariant=True))
    assert isinstance(packed, InvariantLinear)
    x = torch.randn(600, shape[1], generator=generator)
    alone = torch.cat([packed(row[None]) for row in x])
    torch.testing.assert_close(alone, x @ weight.float().T, rtol=1e-4, atol=1e-3)
    for num_rows in [*range(70), 128, 511, 512, 600]:
        assert torch.equal(packed(x[:num_rows]), alone[:num_rows])


def trial(pack: Pack) -> Trial:
    """Of a small matrix on this CPU."""
    return Trial(pack, torch.Size((8, 4)), torch.float32, torch.float32, CPU)


def test_row_counts_are_padded_to_those_that_agree() -> None:
    """A kernel of pairs: odd numbers of rows end with another one, as FBGEMM's do."""

    def pairs(weight: torch.Tensor) -> Part:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            y = x @ weight.T
            y[len(x) - len(x) % 2 :] += 1
            return y

        return multiply

    padded = padded_row_counts(trial(pairs))
    assert padded == (0, *(n + n % 2 for n in range(1, MAX_ROWS + 1)))


def test_a_machine_without_an_invariant_kernel_is_refused() -> None:
    """Where equal rows of one call come out unequal, no padding helps."""

    def uneven(weight: torch.Tensor) -> Part:
        return lambda x: x @ weight.T + torch.arange(len(x))[:, None]

    with pytest.raises(ConfigError, match=r"multiplies equal rows unequally by a \(8, 4\) matrix"):
        padded_row_counts(trial(uneven))


def test_more_than_two_ranks_are_refused(tmp_path: Path) -> None:
    """The order in which a ring of ranks adds depends on where an element stands."""
    path = write_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="at most 2 tensor-parallel ranks"):
        load_decoder(path, dtype="float32", on=INVARIANT, place=Place(tp_size=4))
