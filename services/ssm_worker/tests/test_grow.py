"""The grower against plain forwards of the same checkpoint: level by level, the children that coupling asks for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedModel

from ssm_worker.grow import Grower
from treecore.accept import walk
from treecore.expand import Expansion, num_nodes
from treecore.messages import DraftItem, DraftReply, DraftRequest, RequestId, WorkerId, join_tree
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.sampling import best_tokens
from treecore.testing.checkpoints import TINY, write_tiny_draft
from treecore.testing.draft_steps import GREEDY, draft_step, drafted
from treecore.testing.draft_steps import draft_item as item
from treecore.testing.families import load_reference, write_family

VOCAB_SIZE = int(TINY["vocab_size"])
CONTEXT_LEN = int(TINY["max_position_embeddings"])
SAMPLED = SamplingParams(0.8, 0, 1.0, Seed(2**63 + 11))
Level = list[list[int]]  # per parent in order, its children's tokens


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> "Oracle":
    """Theirs."""
    return Oracle(LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval())


class Oracle:
    """Plain forwards over whole sequences, with transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def children(self, context: Sequence[int], params: SamplingParams, width: int) -> list[int]:
        """The best `width` tokens behind `context`."""
        logits = self._model(torch.tensor([list(context)])).logits[0, -1].float().numpy()
        return best_tokens(logits, None, params, len(context), width).tolist()

    def paths(self, committed: Sequence[int], widths: Sequence[int], params: SamplingParams) -> list[tuple[int, ...]]:
        """All root-to-node sequences of the tree that must come out, level by level."""
        found, level = [()], [()]
        for width in widths:
            level = [(*path, token) for path in level for token in self.children([*committed, *path], params, width)]
            found += level
        return found


def grower(decoder: Decoder, num_blocks: int = 64, block_len: int = 8) -> Grower:
    """A grower that holds nothing."""
    held = HeldRequests(decoder, num_blocks, block_len)
    return Grower(WorkerId("s"), held, VOCAB_SIZE, decoder.output_token_ids)


def step(grower: Grower, *items: DraftItem, session: str = "me", released: tuple[str, ...] = ()) -> DraftReply:
    """One step."""
    return draft_step(grower.step, *items, session=session, released=released)


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    """Random tokens."""
    return rng.integers(0, VOCAB_SIZE, length).tolist()


@pytest.mark.parametrize("case", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3", "opt"])
def test_any_family_drafts(tmp_path: Path, case: str) -> None:
    """Trees behind contexts beyond the window, in two steps, are those of plain forwards."""
    path = write_family(tmp_path, case)
    drafter, theirs = grower(load_decoder(path, dtype="float32")), Oracle(load_reference(path))
    committed = prompt_of(np.random.default_rng(1), 20)
    assert set(drafted(step(drafter, item(committed, (2, 1, 2))), committed[-1]).paths()) == set(
        theirs.paths(committed, (2, 1, 2), GREEDY)
    )
    committed += theirs.children(committed, GREEDY, 1)
    assert set(drafted(step(drafter, item(committed, (1, 1), start=20)), committed[-1]).paths()) == set(
        theirs.paths(committed, (1, 1), GREEDY)
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), widths=st.lists(st.integers(1, 4), max_size=4))
def test_trees_equal_plain_forwards(
    decoder: Decoder, oracle: Oracle, params: SamplingParams, seed: int, widths: list[int]
) -> None:
    """Any expansion: exactly <k1..km>, and at each node the top k of log q + G."""
    prompt = prompt_of(np.random.default_rng(seed), seed % 30 + 1)
    tree = drafted(step(grower(decoder), item(prompt, widths, params=params)), prompt[-1])
    assert len(tree) == num_nodes(widths)
    assert sorted(tree.paths()) == sorted(oracle.paths(prompt, widths, params))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_model_as_llm_accepts_every_drafted_token(
    decoder: Decoder, oracle: Oracle, params: SamplingParams
) -> None:
    """SSM == LLM: step after step, the walk goes down to a leaf."""
    committed, held, ssm = [5, 9, 11], 0, grower(decoder, num_blocks=24, block_len=4)
    for widths in [(1, 1, 1), (2, 1), (1, 1, 1, 1), (3,), (2, 2, 2)] * 2:
        request = item(committed, widths, held, params=None if held else params)
        tree = drafted(step(ssm, request), committed[-1])
        held = len(committed)
        answers = [oracle.children([*committed, *path], params, 1)[0] for path in tree.paths()]
        accepted = walk(tree, np.array(answers, np.int32))
        assert len(accepted.nodes) == len(widths)
        committed += accepted.tokens


def test_what_was_not_accepted_does_not_stay(decoder: Decoder, oracle: Oracle) -> None:
    """Wrong branches of the last tree never show in the next one, whatever was accepted."""
    rng = np.random.default_rng(4)
    committed, held, ssm = prompt_of(rng, 6), 0, grower(decoder, num_blocks=32, block_len=4)
    for _ in range(12):
        tree = drafted(step(ssm, item(committed, (2, 2), held)), committed[-1])
        assert sorted(tree.paths()) == sorted(oracle.paths(committed, (2, 2), GREEDY))
        held = len(committed)
        path = list(tree.paths())[int(rng.integers(len(tree)))]
        committed += [*path, int(rng.integers(VOCAB_SIZE))]


def test_a_batch_equals_solo_runs(decoder: Decoder, oracle: Oracle) -> None:
    """Requests of all lengths, laws and expansions in one message, prefills among them."""
    rng = np.random.default_rng(8)
    prompts = [prompt_of(rng, int(rng.integers(1, 50))) for _ in range(12)]
    shapes: list[tuple[int, ...]] = [(2, 1), (), (1,), (3, 2), (1, 1, 1), ()] * 2
    laws = [GREEDY if idx % 2 else replace(SAMPLED, seed=Seed(idx)) for idx in range(12)]
    items = [item(prompts[idx], shapes[idx], params=laws[idx], request_id=RequestId(f"r{idx}")) for idx in range(12)]
    reply = step(grower(decoder, 200), *items)
    for idx, prompt in enumerate(prompts):
        tree = drafted(reply, prompt[-1], f"r{idx}")
        assert sorted(tree.paths()) == sorted(oracle.paths(prompt, shapes[idx], laws[idx]))


def test_prefill_then_draft_equals_draft_at_once(decoder: Decoder) -> None:
    """An empty expansion fills the cache and drafts nothing."""
    prompt = prompt_of(np.random.default_rng(2), 30)
    ssm = grower(decoder)
    assert len(drafted(step(ssm, item(prompt)), prompt[-1])) == 1
    later = drafted(step(ssm, item(prompt, (2, 2), 29)), prompt[-1])
    at_once = drafted(step(grower(decoder), item(prompt, (2, 2))), prompt[-1])
    np.testing.assert_array_equal(later.tokens, at_once.tokens)


def test_retries_are_idempotent(decoder: Decoder) -> None:
    """Twice the same request: the same tree, the same blocks; a smaller tree in between changes nothing."""
    prompt = prompt_of(np.random.default_rng(2), 11)
    ssm = grower(decoder)
    first = step(ssm, item(prompt, (2, 2)))
    step(ssm, item(prompt, (1,), 10))
    again = step(ssm, item(prompt, (2, 2)))
    assert again.items[0].tokens.tolist() == first.items[0].tokens.tolist()
    assert again.blocks == first.blocks


def test_more_children_than_tokens(decoder: Decoder) -> None:
    """A level wider than the vocabulary has every token once."""
    tree = drafted(step(grower(decoder), item([1], (VOCAB_SIZE + 40,))), 1)
    assert sorted(tree.tokens[1:].tolist()) == list(range(VOCAB_SIZE))


def test_truncation_narrows_levels(decoder: Decoder, oracle: Oracle) -> None:
    """top_k 2 leaves two children where four were asked for; the next level grows on those."""
    params = replace(SAMPLED, top_k=2)
    tree = drafted(step(grower(decoder), item([1, 2], (4, 4), params=params)), 2)
    assert len(tree) == num_nodes((2, 2))
    assert sorted(tree.paths()) == sorted(oracle.paths([1, 2], (4, 4), params))


def test_a_trimmed_head_proposes_real_token_ids(tmp_path: Path, checkpoint: Path) -> None:
    """The head's rows are tokens of the LLM's vocabulary; children are among them."""
    kept = [3, 7, 8, 30, 44, 60]
    artefact = write_tiny_draft(tmp_path / "draft", token_ids=kept)
    trimmed = load_decoder(artefact, dtype="float32", embedding_from=checkpoint)
    tree = drafted(step(grower(trimmed), item([1, 2], (6, 2), params=SAMPLED)), 2)
    assert sorted(tree.tokens[1:7].tolist()) == kept
    assert set(tree.tokens[1:].tolist()) <= set(kept)


def test_a_tree_stops_growing_where_blocks_run_out(decoder: Decoder) -> None:
    """A shallower tree is as good as any; the other request is not harmed."""
    ssm = grower(decoder, num_blocks=4, block_len=4)
    other = item([4, 5], (1,), request_id=RequestId("other"))
    reply = step(ssm, item([1] * 11, (3, 3, 3)), other)
    assert reply.refused == ()
    assert len(drafted(reply, 1)) < num_nodes((3, 3, 3))
    assert len(drafted(reply, 5, "other")) == 2
    assert step(ssm, released=("r", "other")).blocks.used == 0


REFUSED: list[tuple[str, DraftItem]] = [
    ("malformed_message", item([1, VOCAB_SIZE], (1,))),
    ("malformed_message", item([-1, 1], (1,))),
    ("malformed_message", item([], (1,))),
    ("malformed_message", replace(item([1, 2], (1,)), start=-1)),
    ("malformed_message", item([1, 2], (2, 0))),
    ("malformed_message", item([1, 2], (-3,))),
    ("malformed_message", item([1] * (CONTEXT_LEN + 1))),
    ("malformed_message", item([1] * (CONTEXT_LEN - 1), (1, 1, 1))),
    ("state_missing", item([1, 2, 3], (1,), 2, params=GREEDY)),
    ("state_missing", item([1, 2, 3], (1,), params=None)),
    ("out_of_blocks", item([1] * 200, (1,))),
]


@pytest.mark.parametrize(("reason", "bad"), REFUSED)
def test_a_refused_item_harms_no_other(decoder: Decoder, oracle: Oracle, reason: str, bad: DraftItem) -> None:
    """Between two sound ones; a release gives everything back."""
    ssm = grower(decoder, num_blocks=20)
    sound = [item([5, 6, 7], (2, 1), request_id=RequestId(name)) for name in "ab"]
    reply = step(ssm, sound[0], bad, sound[1])
    assert [(refused.request_id, refused.reason) for refused in reply.refused] == [("r", reason)]
    for name in "ab":
        assert sorted(drafted(reply, 7, name).paths()) == sorted(oracle.paths([5, 6, 7], (2, 1), GREEDY))
    assert step(ssm, released=("a", "b", "r")).blocks.used == 0


def test_the_last_position_of_the_context_may_be_used(decoder: Decoder) -> None:
    """Inner nodes fill the context to its end; leaves need no position."""
    prompt = prompt_of(np.random.default_rng(3), CONTEXT_LEN - 1)
    assert len(drafted(step(grower(decoder), item(prompt, (1, 1))), prompt[-1])) == 3


def test_release_and_session_change_free_everything(decoder: Decoder) -> None:
    """What is released is free at once; a new session starts from nothing."""
    ssm = grower(decoder)
    step(ssm, *[item([1, 2, 3], (2,), request_id=RequestId(name)) for name in "abc"])
    assert step(ssm, released=("a", "a", "nobody")).blocks.used == 2
    reply = step(ssm, item([1, 2, 3, 4], (1,), 3, request_id=RequestId("b")), session="next")
    assert [refused.reason for refused in reply.refused] == ["state_missing"]
    assert reply.blocks.used == 0


WILD = replace(SAMPLED, repetition_penalty=1.3, bias_ids=(1, 2), biases=(-100.0, 2.0), min_tokens=9, end_token_ids=(3,))
OUTSIDE = replace(SAMPLED, bias_ids=(VOCAB_SIZE,), biases=(1.0,))  # of a token that the model does not have
wild_items = st.builds(
    DraftItem,
    st.sampled_from(["a", "b", "c"]).map(RequestId),
    st.integers(0, 3),
    st.integers(-1, 12),
    st.lists(st.integers(-1, VOCAB_SIZE), max_size=12).map(lambda ids: np.array(ids, np.int32)),
    st.sampled_from([None, GREEDY, SAMPLED, WILD, OUTSIDE]),
    st.lists(st.integers(-1, 3), max_size=4).map(lambda widths: Expansion(tuple(widths))),
)
wild_requests = st.builds(
    DraftRequest,
    st.sampled_from(["me", "other"]),
    st.integers(0, 1),
    st.lists(st.sampled_from(["a", "b"]).map(RequestId), max_size=2).map(tuple),
    st.lists(wild_items, max_size=4).map(tuple),
)


@settings(max_examples=40)
@given(requests=st.lists(wild_requests, min_size=1, max_size=6))
def test_wild_requests_never_break_the_grower(decoder: Decoder, requests: list[DraftRequest]) -> None:
    """Whatever comes: a tree or a refusal for each item, the books in balance, and sound work goes on."""
    ssm = grower(decoder, num_blocks=6, block_len=4)
    for request in requests:
        reply = ssm.step(request)
        assert len(reply.items) + len(reply.refused) == len(request.items)
        assert reply.blocks.room + reply.blocks.used == reply.blocks.total
        for entry in reply.items:
            join_tree(0, entry.tokens, entry.parents)
    assert step(ssm, item([1, 2, 3], (2,)), session="sound").refused == ()
    assert step(ssm, released=("r",), session="sound").blocks.used == 0
