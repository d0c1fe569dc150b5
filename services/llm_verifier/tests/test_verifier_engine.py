"""The engine against plain forwards of the same checkpoint: every node's token is what its path alone gives."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from llm_verifier.engine import Engine
from treecore.accept import walk
from treecore.errors import ConfigError
from treecore.messages import (
    RefusedItem,
    RequestId,
    VerifiedItem,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
    WorkerId,
    split_tree,
)
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.noise import Seed
from treecore.params import Grammar, SamplingParams
from treecore.sampling import best_tokens
from treecore.sparse import Supports
from treecore.testing.checkpoints import TINY, write_tiny_llama
from treecore.testing.trees import random_tree
from treecore.tree import TokenTree, chain

VOCAB_SIZE = int(TINY["vocab_size"])
CONTEXT_LEN = int(TINY["max_position_embeddings"])
GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0))
SAMPLED = SamplingParams(0.8, 0, 0.95, Seed(2**63 + 11))
NO_TREE = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return write_tiny_llama(tmp_path_factory.mktemp("llm") / "tiny", seed=3)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    """Ours."""
    return load_decoder(checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> "Oracle":
    """Theirs."""
    return Oracle(LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval())


class Oracle:
    """Plain forwards over whole sequences, with transformers."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model

    @torch.inference_mode()
    def next_token(self, context: Sequence[int], params: SamplingParams) -> int:
        """What incremental decoding would choose behind `context`."""
        logits = self._model(torch.tensor([list(context)])).logits[0, -1].float().numpy()
        return int(best_tokens(logits, None, params, len(context))[0])

    def node_tokens(self, committed: Sequence[int], tree: TokenTree, params: SamplingParams) -> list[int]:
        """The same behind every node of `tree`, path by path."""
        return [self.next_token([*committed, *path], params) for path in tree.paths()]

    def decode(self, prompt: Sequence[int], params: SamplingParams, num_tokens: int) -> list[int]:
        """Incremental decoding."""
        context = list(prompt)
        for _ in range(num_tokens):
            context.append(self.next_token(context, params))
        return context[len(prompt) :]


def engine(decoder: Decoder, num_blocks: int = 64, block_len: int = 8) -> Engine:
    """An engine that holds nothing."""
    return Engine(WorkerId("v"), HeldRequests(decoder, num_blocks, block_len), VOCAB_SIZE)


def item(committed: Sequence[int], tree: TokenTree | None = None, start: int = 0, **more: object) -> VerifyItem:
    """Request r: committed tokens from `start` on, with `tree` (the root alone by default) behind them."""
    tokens, parents = split_tree(tree) if tree is not None else (NO_TREE, NO_TREE)
    sent = np.array(committed[start:], np.int32)
    made = VerifyItem(RequestId("r"), 0, start, sent, None if start else GREEDY, tokens, parents, True)
    return replace(made, **more)  # type: ignore[arg-type]


def step(engine: Engine, *items: VerifyItem, session: str = "me", released: tuple[str, ...] = ()) -> VerifyReply:
    """One step; the integrity equation must hold behind it."""
    reply = engine.step(VerifyRequest(session, tuple(map(RequestId, released)), items))
    assert reply.blocks.room + reply.blocks.used == reply.blocks.total
    assert sorted(entry.request_id for entry in (*reply.items, *reply.refused)) == sorted(i.request_id for i in items)
    return reply


def answered(reply: VerifyReply, request_id: str = "r") -> list[int]:
    """The tokens of one item."""
    (found,) = [entry for entry in reply.items if entry.request_id == request_id]
    return found.tokens.tolist()


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    """Random tokens."""
    return rng.integers(0, VOCAB_SIZE, length).tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_trees_equal_plain_forwards(decoder: Decoder, oracle: Oracle, params: SamplingParams, seed: int) -> None:
    """Random trees, up to 70 nodes, behind random prompts; also behind a prompt that is cached already."""
    rng = np.random.default_rng(seed)
    prompt = prompt_of(rng, int(rng.integers(1, 40)))
    verifier = engine(decoder)
    for _ in range(2):
        tree = random_tree(rng, int(rng.choice([1, 2, 9, 70])), VOCAB_SIZE, prompt[-1])
        assert answered(step(verifier, item(prompt, tree, params=params))) == oracle.node_tokens(prompt, tree, params)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(3))
def test_generation_over_random_trees_equals_incremental_decoding(
    decoder: Decoder, oracle: Oracle, params: SamplingParams, seed: int
) -> None:
    """Step after step on accepted paths (half of each tree is the truth), over many block borders."""
    rng = np.random.default_rng(seed)
    prompt = prompt_of(rng, 5)
    wanted = oracle.decode(prompt, params, 40)
    committed, held, verifier = list(prompt), 0, engine(decoder, num_blocks=16, block_len=4)
    while len(committed) < len(prompt) + 30:
        tree = hopeful_tree(rng, [*prompt, *wanted], len(committed))
        reply = step(verifier, item(committed, tree, held, params=None if held else params))
        held = len(committed)
        committed += walk(tree, np.array(answered(reply), np.int32)).tokens
        assert committed[len(prompt) :] == wanted[: len(committed) - len(prompt)]


def hopeful_tree(rng: np.random.Generator, truth: Sequence[int], committed_len: int) -> TokenTree:
    """A chain of the true next tokens hidden among random branches."""
    depth = int(rng.integers(0, 5))
    tokens, parents, tip = [truth[committed_len - 1]], [-1], 0
    for true_token in truth[committed_len : committed_len + depth]:
        for wrong in range(int(rng.integers(0, 3))):
            tokens.append((true_token + 1 + wrong) % VOCAB_SIZE)
            parents.append(tip)
        tokens.append(true_token)
        parents.append(tip)
        tip = len(tokens) - 1
    return TokenTree.checked(np.array(tokens, np.int32), np.array(parents, np.int32), 0)


def test_a_batch_equals_solo_runs(decoder: Decoder, oracle: Oracle) -> None:
    """16 requests of all lengths, greedy and sampled, chunks among them: nobody's rows are mixed with another's."""
    rng = np.random.default_rng(8)
    prompts = [prompt_of(rng, int(rng.integers(1, 60))) for _ in range(16)]
    trees = [random_tree(rng, int(rng.integers(1, 20)), VOCAB_SIZE, prompt[-1]) for prompt in prompts]
    params = [GREEDY if idx % 2 else replace(SAMPLED, seed=Seed(idx)) for idx in range(16)]
    items = [
        item(prompt, tree, params=law, request_id=RequestId(f"r{idx}"))
        for idx, (prompt, tree, law) in enumerate(zip(prompts, trees, params, strict=True))
    ]
    chunk = item(prompt_of(rng, 30), params=GREEDY, request_id=RequestId("chunk"), wants_token=False)
    reply = step(engine(decoder, num_blocks=200), *items[:7], chunk, *items[7:])
    assert answered(reply, "chunk") == []
    for idx in range(16):
        assert answered(reply, f"r{idx}") == oracle.node_tokens(prompts[idx], trees[idx], params[idx])


@pytest.mark.parametrize("cuts", [(1,), (7, 8, 9), (16, 32), tuple(range(1, 50))])
def test_a_prompt_in_chunks_equals_one_in_one_piece(decoder: Decoder, oracle: Oracle, cuts: tuple[int, ...]) -> None:
    """However it is cut; chunks are answered with no token."""
    prompt = prompt_of(np.random.default_rng(1), 50)
    verifier = engine(decoder)
    starts, ends = (0, *cuts), (*cuts, len(prompt))
    for start, end in zip(starts, ends, strict=True):
        last = step(verifier, item(prompt[:end], None, start, wants_token=end == len(prompt)))
        assert last.refused == ()
        assert len(last.items[0].tokens) == (end == len(prompt))
    assert answered(last) == oracle.node_tokens(prompt, TokenTree.of_root(prompt[-1]), GREEDY)


def test_a_long_prompt_is_computed_in_several_forwards(tmp_path: Path) -> None:
    """1,300 tokens at once equal the same tokens in chunks of 100."""
    long = load_decoder(write_tiny_llama(tmp_path / "long", seed=4, max_position_embeddings=2048), dtype="float32")
    prompt = prompt_of(np.random.default_rng(2), 1300)
    whole = answered(step(engine(long, 200), item(prompt)))
    verifier = engine(long, 200)
    for end in range(100, 1301, 100):
        reply = step(verifier, item(prompt[:end], None, end - 100, wants_token=end == 1300))
    assert answered(reply) == whole


def test_retries_are_idempotent(decoder: Decoder) -> None:
    """The same request twice, and once more behind another tree: the same answer, the same blocks."""
    rng = np.random.default_rng(5)
    prompt = prompt_of(rng, 21)
    tree, other = (random_tree(rng, 12, VOCAB_SIZE, prompt[-1]) for _ in range(2))
    verifier = engine(decoder)
    first = step(verifier, item(prompt, tree))
    again = step(verifier, item(prompt, tree))
    assert answered(again) == answered(first)
    assert again.blocks == first.blocks
    step(verifier, item(prompt, other, 20))
    assert answered(step(verifier, item(prompt, tree, 20))) == answered(first)


def test_an_older_step_may_come_again(decoder: Decoder, oracle: Oracle) -> None:
    """The reply was lost and the manager fell back: what was accepted since is forgotten, not mixed in."""
    prompt = prompt_of(np.random.default_rng(6), 9)
    verifier = engine(decoder)
    step(verifier, item(prompt, chain([prompt[-1], 4, 5])))
    step(verifier, item([*prompt, 4, 5, 6], chain([6, 1]), 9))
    reply = step(verifier, item([*prompt[:6], 50, 51], None, 6))
    assert answered(reply) == [oracle.next_token([*prompt[:6], 50, 51], GREEDY)]


def test_release_and_session_change_free_everything(decoder: Decoder) -> None:
    """What is released is free at once; a new session starts from nothing; unknown names are fine."""
    verifier = engine(decoder)
    names = [RequestId(name) for name in "abc"]
    step(verifier, *[item([1, 2, 3], request_id=name) for name in names])
    assert step(verifier, released=("a", "a", "nobody")).blocks.used == 2
    assert answered(step(verifier, item([1, 2, 3, 4], None, 3, request_id=names[1])), "b")
    reply = step(verifier, item([1, 2, 3, 4], None, 3, request_id=names[1]), session="next")
    assert [(refused.reason, refused.held_len) for refused in reply.refused] == [("state_missing", 0)]
    assert reply.blocks.used == 0


def test_a_release_makes_room_within_its_own_message(decoder: Decoder) -> None:
    """Finished requests leave before new ones enter."""
    verifier = engine(decoder, num_blocks=2)
    step(verifier, item([1] * 16, request_id=RequestId("old")))
    assert step(verifier, item([1] * 16, request_id=RequestId("new")), released=("old",)).refused == ()


REFUSED: list[tuple[str, VerifyItem]] = [
    ("malformed_message", item([1, VOCAB_SIZE])),
    ("malformed_message", item([1, 2**31 - 1])),
    ("malformed_message", item([1, -1])),
    ("malformed_message", item([])),
    ("malformed_message", replace(item([1, 2]), start=-1)),
    (
        "malformed_message",
        item([1, 2], tree_tokens=np.array([VOCAB_SIZE], np.int32), tree_parents=np.zeros(1, np.int32)),
    ),
    ("malformed_message", item([1, 2], tree_tokens=np.array([-1], np.int32), tree_parents=np.zeros(1, np.int32))),
    ("malformed_message", item([1, 2], tree_tokens=np.array([3], np.int32), tree_parents=np.array([1], np.int32))),
    ("malformed_message", item([1, 2], tree_tokens=np.array([3], np.int32), tree_parents=np.array([-1], np.int32))),
    ("malformed_message", item([1, 2], tree_tokens=np.array([3, 4], np.int32), tree_parents=np.array([0], np.int32))),
    ("malformed_message", item([1] * (CONTEXT_LEN + 1))),
    ("malformed_message", item([1] * (CONTEXT_LEN - 1), chain([1, 2, 3]))),
    ("state_missing", item([1, 2, 3], None, 2, params=GREEDY)),
    ("state_missing", item([1, 2, 3], params=None)),
    ("out_of_blocks", item([1] * 200)),
    (
        "out_of_blocks",
        item(
            [1] * 100,
            random_tree(np.random.default_rng(0), 60, VOCAB_SIZE, 1),
            params=replace(SAMPLED, rule="multi_step"),
            supports=Supports(*(np.array(values, np.int32) for values in ([0], [1], [5]))),
        ),
    ),
]


@pytest.mark.parametrize(("reason", "bad"), REFUSED)
def test_a_refused_item_harms_no_other(decoder: Decoder, oracle: Oracle, reason: str, bad: VerifyItem) -> None:
    """Before, between and behind sound ones; the next step is sound, and a release gives everything back."""
    verifier = engine(decoder, num_blocks=20)
    sound = [item([5, 6, 7], chain([7, 8]), request_id=RequestId(name)) for name in "ab"]
    wanted = oracle.node_tokens([5, 6, 7], chain([7, 8]), GREEDY)
    reply = step(verifier, sound[0], bad, sound[1])
    assert [(refused.request_id, refused.reason) for refused in reply.refused] == [("r", reason)]
    assert answered(reply, "a") == answered(reply, "b") == wanted
    assert answered(step(verifier, sound[1], item([5, 6])), "b") == wanted
    assert step(verifier, released=("a", "b", "r")).blocks.used == 0


def test_a_tree_without_room_costs_its_tree_only(decoder: Decoder, oracle: Oracle) -> None:
    """The root alone is verified; REFUSED has the case where the tree's size depends on draws."""
    prompt = prompt_of(np.random.default_rng(9), 100)
    tree = random_tree(np.random.default_rng(0), 60, VOCAB_SIZE, prompt[-1])
    verifier = engine(decoder, num_blocks=16)
    assert answered(step(verifier, item(prompt, tree))) == [oracle.next_token(prompt, GREEDY)]
    assert answered(step(verifier, item(prompt, chain([prompt[-1], 4])))) == oracle.node_tokens(
        prompt, chain([prompt[-1], 4]), GREEDY
    )


def test_who_is_refused_for_want_of_blocks_holds_nothing(decoder: Decoder) -> None:
    """Its blocks are there for others at once; what it computed is found when it comes back."""
    verifier = engine(decoder, num_blocks=20)
    prompt = prompt_of(np.random.default_rng(10), 81)
    step(verifier, item(prompt))
    other = item(prompt_of(np.random.default_rng(11), 65), request_id=RequestId("other"))
    assert step(verifier, other).refused == ()
    reply = step(verifier, item([*prompt, *[1] * 40], None, 81))
    assert [(refused.reason, refused.held_len) for refused in reply.refused] == [("out_of_blocks", 0)]
    assert (reply.blocks.used, reply.blocks.cached) == (9, 10)
    assert step(verifier, item(prompt)).items[0].num_found == 80


def test_the_same_request_twice_in_a_message_is_answered_once(decoder: Decoder) -> None:
    """The second one is refused: the cache could follow only one of them."""
    reply = step(engine(decoder), item([1, 2]), item([1, 3]), item([9], request_id=RequestId("other")))
    assert [refused.reason for refused in reply.refused] == ["malformed_message"]
    assert len(reply.items) == 2


wild_ids = st.sampled_from(["a", "b", "c"]).map(RequestId)
wild_tokens = st.lists(st.integers(-1, VOCAB_SIZE), max_size=12).map(lambda ids: np.array(ids, np.int32))
wild_parents = st.lists(st.integers(-1, 4), max_size=12).map(lambda ids: np.array(ids, np.int32))
WILD = replace(
    SAMPLED,
    repetition_penalty=1.3,
    bias_ids=(1, 2),
    biases=(-100.0, 2.0),
    min_tokens=9,
    end_token_ids=(3,),
    num_logprobs=2,
)
OUTSIDE = replace(SAMPLED, bias_ids=(VOCAB_SIZE,), biases=(1.0,))  # of a token that the model does not have
UNKNOWN = replace(SAMPLED, grammar=Grammar("regex", "a"))  # this worker has no grammars
wild_items = st.builds(
    VerifyItem,
    wild_ids,
    st.integers(0, 3),
    st.integers(-1, 12),
    wild_tokens,
    st.sampled_from([None, GREEDY, SAMPLED, WILD, OUTSIDE, UNKNOWN]),
    wild_tokens,
    wild_parents,
    st.booleans(),
    st.none() | st.builds(Supports, wild_parents, wild_parents, wild_tokens),
)
wild_requests = st.builds(
    VerifyRequest,
    st.sampled_from(["me", "other"]),
    st.lists(wild_ids, max_size=2).map(tuple),
    st.lists(wild_items, max_size=4).map(tuple),
)


@settings(max_examples=40)
@given(requests=st.lists(wild_requests, min_size=1, max_size=6))
def test_wild_requests_never_break_the_engine(decoder: Decoder, requests: list[VerifyRequest]) -> None:
    """Whatever comes: an answer or a refusal for each item, the books in balance, and sound work goes on."""
    verifier = engine(decoder, num_blocks=5, block_len=4)
    for request in requests:
        reply = verifier.step(request)
        assert len(reply.items) + len(reply.refused) == len(request.items)
        assert reply.blocks.room + reply.blocks.used == reply.blocks.total
        assert all(isinstance(entry, VerifiedItem) for entry in reply.items)
        assert all(isinstance(entry, RefusedItem) for entry in reply.refused)
    assert step(verifier, item([1, 2, 3]), session="sound").refused == ()
    assert step(verifier, released=("r",), session="sound").blocks.used == 0


def test_a_model_that_gives_no_numbers_fails_its_requests_only(tmp_path: Path) -> None:
    """NaN in the logits: a typed refusal, and the worker lives."""
    broken = load_decoder(write_tiny_llama(tmp_path / "nan"), dtype="float32")
    broken._stage.norm.gain.fill_(float("nan"))
    verifier = engine(broken)
    for params in (GREEDY, SAMPLED, WILD):
        reply = step(verifier, item([1, 2, 3], params=params), session=str(params))
        assert [entry.reason for entry in reply.refused] == ["model_failed"]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_supports_are_for_rules_that_draw(decoder: Decoder, params: SamplingParams) -> None:
    """A support for another rule, or one of no nodes, is refused; nobody dies of it."""
    some = Supports(*(np.array(values, np.int32) for values in ([0], [1], [5])))
    none = Supports(*(np.empty(0, np.int32) for _ in range(3)))
    for supports in (some, none):
        reply = step(engine(decoder), item([1, 2, 3], params=params, supports=supports))
        assert [entry.reason for entry in reply.refused] == ["malformed_message"]


def test_a_cache_that_holds_no_block_is_refused(decoder: Decoder) -> None:
    """By the names of the flags; such a worker would announce itself and never be able to serve."""
    with pytest.raises(ConfigError, match="--kv-tokens is below --block-len 4096"):
        engine(decoder, num_blocks=64 // 4096, block_len=4096)
