"""Prefix reuse through the engine: what is found, what never is, and that no answer depends on it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from llm_verifier.engine import Engine
from treecore.accept import walk
from treecore.messages import RequestId, VerifiedItem, VerifyItem, VerifyReply, VerifyRequest, WorkerId, split_tree
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.kv_pool import KvPool
from treecore.model.load import load_decoder
from treecore.model.spec import ModelSpec
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.checkpoints import TINY, write_tiny_llama
from treecore.tree import TokenTree, chain

VOCAB_SIZE = int(TINY["vocab_size"])
BLOCK_LEN = 8
GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0))


class Counting:
    """A decoder that counts the rows that it computes."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.num_rows = 0

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    def new_pool(self, num_slots: int) -> KvPool:
        return self._decoder.new_pool(num_slots)

    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        self.num_rows += len(batch.tokens)
        return self._decoder.forward(batch, pool)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A tiny random Llama."""
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("llm") / "tiny", seed=3)
    return load_decoder(path, dtype="float32")


@pytest.fixture
def decoder(tiny: Decoder) -> Counting:
    """The same, counting from nothing."""
    return Counting(tiny)


def engine(decoder: Counting, num_blocks: int = 64, *, reuses_prefixes: bool = True) -> Engine:
    """An engine that holds nothing."""
    held = HeldRequests(decoder, num_blocks, BLOCK_LEN, reuses_prefixes=reuses_prefixes)
    return Engine(WorkerId("v"), held, VOCAB_SIZE)


def item(name: str, committed: Sequence[int], tree: TokenTree | None = None, start: int = 0) -> VerifyItem:
    """Committed tokens from `start` on, with `tree` (the root alone by default) behind them."""
    tokens, parents = split_tree(tree or TokenTree.of_root(committed[-1]))
    sent = np.array(committed[start:], np.int32)
    return VerifyItem(RequestId(name), 0, start, sent, None if start else GREEDY, tokens, parents, True)


def step(verifier: Engine, *items: VerifyItem, released: Sequence[str] = ()) -> VerifyReply:
    """One step in which nothing is refused."""
    reply = verifier.step(VerifyRequest("me", tuple(map(RequestId, released)), items))
    assert reply.refused == ()
    assert reply.blocks.room + reply.blocks.used == reply.blocks.total
    return reply


def ask(verifier: Engine, name: str, prompt: Sequence[int]) -> VerifiedItem:
    """The first step of a request with this prompt."""
    return step(verifier, item(name, prompt)).items[0]


def prompt_of(seed: int, length: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def generate(verifier: Engine, name: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Prompt and output, decoded over trees of which some nodes are right and some wrong; then it is released."""
    rng, committed, held = np.random.default_rng(1), list(prompt), 0
    while len(committed) < len(prompt) + num_tokens:
        hopes = [rng.integers(0, VOCAB_SIZE, 2).tolist() for _ in range(2)]
        truth = ask(verifier, "oracle", committed).tokens.tolist()
        tokens = np.array([committed[-1], hopes[0][0], truth[0], hopes[1][0], hopes[1][1]], np.int32)
        tree = TokenTree.checked(tokens, np.array([-1, 0, 0, 2, 2], np.int32), 0)
        reply = step(verifier, item(name, committed, tree, held), released=["oracle"])
        held = len(committed)
        committed += walk(tree, reply.items[0].tokens).tokens
    step(verifier, released=[name])
    return committed


def test_the_second_turn_of_a_chat_reuses_the_first(decoder: Counting) -> None:
    """At least 95 % of the first turn's full blocks, the answer's own among them; only the rest is computed."""
    verifier = engine(decoder)
    first = generate(verifier, "turn 1", prompt_of(0, 30), 40)
    second = [*first, *prompt_of(2, 9)]
    decoder.num_rows = 0
    found = ask(verifier, "turn 2", second)
    assert found.num_found >= 0.95 * (len(first) // BLOCK_LEN * BLOCK_LEN)
    assert decoder.num_rows == len(second) - found.num_found
    assert found.tokens.tolist() == ask(engine(decoder), "fresh", second).tokens.tolist()


def test_a_rejected_nodes_tokens_are_never_found(decoder: Counting) -> None:
    """A chain of 20 nodes, computed and rejected: whoever comes with its tokens finds what was committed, no more."""
    verifier = engine(decoder)
    prompt, drafted = prompt_of(3, 16), prompt_of(4, 20)
    reply = step(verifier, item("a", prompt, chain([prompt[-1], *drafted])))
    truth = int(reply.items[0].tokens[0])
    assert truth != drafted[0]
    step(verifier, item("a", [*prompt, truth], None, 16))
    expected = ask(engine(decoder), "b", [*prompt, *drafted]).tokens.tolist()
    found = ask(verifier, "b", [*prompt, *drafted])
    assert (found.num_found, found.tokens.tolist()) == (16, expected)


def test_equal_prompts_in_one_step_are_computed_once_and_share_their_blocks(decoder: Counting) -> None:
    """Four choices of 100 tokens: twelve full blocks once, four tails of four tokens, one block for each tail."""
    verifier, prompt = engine(decoder), prompt_of(5, 100)
    reply = step(verifier, *[item(name, prompt) for name in "abcd"])
    assert decoder.num_rows == 96 + 4 * 4
    assert [answer.num_found for answer in reply.items] == [0, 96, 96, 96]
    assert len({tuple(answer.tokens) for answer in reply.items}) == 1
    assert reply.blocks.used == 12 + 4


def test_prompts_that_begin_alike_compute_the_beginning_once(decoder: Counting) -> None:
    """A common system prompt of 72 tokens, then texts of their own."""
    verifier, system = engine(decoder), prompt_of(6, 72)
    prompts = [[*system, *prompt_of(seed, 10)] for seed in (7, 8, 9)]
    reply = step(verifier, *[item(f"r{idx}", prompt) for idx, prompt in enumerate(prompts)])
    assert decoder.num_rows == 72 + 3 * 10
    alone = [ask(engine(decoder), "alone", prompt).tokens.tolist() for prompt in prompts]
    assert [answer.tokens.tolist() for answer in reply.items] == alone


def test_whoever_computed_the_same_at_the_same_time_keeps_one_copy(decoder: Counting) -> None:
    """Too short to wait for each other (40 tokens): computed twice, held once."""
    prompt = prompt_of(10, 40)
    reply = step(engine(decoder), item("a", prompt), item("b", prompt))
    assert decoder.num_rows == 80
    assert reply.blocks.used == 4 + 2


def test_two_choices_go_their_own_ways(decoder: Counting) -> None:
    """They share a prompt and then commit different tokens: each sees its own."""
    verifier, prompt = engine(decoder), prompt_of(11, 70)
    step(verifier, item("a", prompt), item("b", prompt))
    texts = {name: [*prompt, *prompt_of(seed, 20)] for name, seed in (("a", 12), ("b", 13))}
    reply = step(verifier, *[item(name, text, None, 70) for name, text in texts.items()])
    for answer in reply.items:
        alone = ask(engine(decoder), "alone", texts[answer.request_id])
        assert answer.tokens.tolist() == alone.tokens.tolist()


@pytest.mark.parametrize("reuses_prefixes", [True, False])
def test_reuse_can_be_turned_off(decoder: Counting, *, reuses_prefixes: bool) -> None:
    """Then nothing is found, nothing stays behind, and the answers are the same."""
    verifier, prompt = engine(decoder, reuses_prefixes=reuses_prefixes), prompt_of(14, 80)
    first, again = ask(verifier, "a", prompt), ask(verifier, "b", prompt)
    assert first.tokens.tolist() == again.tokens.tolist()
    assert again.num_found == (72 if reuses_prefixes else 0)
    both = step(verifier, replace(item("c", prompt)), item("d", prompt))
    assert [answer.num_found for answer in both.items] == ([72, 72] if reuses_prefixes else [0, 0])
    assert step(verifier, released="abcd").blocks.cached == (9 if reuses_prefixes else 0)
