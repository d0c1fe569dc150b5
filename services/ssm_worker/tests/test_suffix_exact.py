"""Drafts of an SSM without weights, verified: the output is the LLM's own, token by token or in law, by every rule."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ssm_worker.suffix import SuffixDrafter
from ssm_worker.texts import HeldTexts
from treecore.accept import walk
from treecore.expand import NO_DRAFT, Expansion, Growth
from treecore.law import processed
from treecore.merge import prune
from treecore.messages import (
    DraftItem,
    DraftRequest,
    RequestId,
    VerifyItem,
    VerifyRequest,
    WorkerId,
    join_tree,
    split_tree,
)
from treecore.multi_step import supports_of, walk_multi_step
from treecore.noise import Seed
from treecore.params import Rule, SamplingParams
from treecore.testing.scripted import ScriptedModel, decode_alone
from treecore.testing.statistics import chi_square, chi_square_limit
from treecore.testing.workers import FakeVerifier

LLM = ScriptedModel(4, seed=8, memory=2, spread=1.5)
PROMPT = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3, 0, 1]
PARAMS = SamplingParams(1.0, 3, 1.0, Seed(0), prompt_len=len(PROMPT))
ITEM = RequestId("r")


def steps(params: SamplingParams, shape: Expansion | Growth) -> Iterator[tuple[int, ...]]:
    """The tokens of one step after another, each drafted, cut, verified and accepted afresh."""
    drafter = SuffixDrafter(WorkerId("s"), HeldTexts(64, 8), LLM.vocab_size, 512, min_match=1)
    verifier = FakeVerifier(LLM, WorkerId("v"))
    growth = shape if isinstance(shape, Growth) else None
    expansion = NO_DRAFT if isinstance(shape, Growth) else shape
    committed = list(PROMPT)
    while True:
        sent = np.array(committed, np.int32)
        draft = DraftItem(ITEM, 0, 0, sent, params, expansion, growth)
        (entry,) = drafter.step(DraftRequest("me", 7, (), (draft,))).items
        tree = prune(join_tree(committed[-1], entry.tokens, entry.parents, 7, entry.laws), 6, 8)
        supports = supports_of(tree)
        question = VerifyItem(ITEM, 0, 0, sent, params, *split_tree(tree), wants_token=True, supports=supports)
        (answer,) = verifier.step(VerifyRequest("me", (), (question,))).items
        if supports is None:
            path = walk(tree, answer.tokens)
        else:
            assert answer.masses is not None
            path = walk_multi_step(tree, answer.tokens, answer.masses, supports, params, len(committed))
        yield path.tokens
        committed += path.tokens


def decode(params: SamplingParams, shape: Expansion | Growth, num_tokens: int) -> tuple[tuple[int, ...], int]:
    """The first tokens, and how many steps they took."""
    tokens: tuple[int, ...] = ()
    for num_steps, more in enumerate(steps(params, shape), 1):
        tokens += more
        if len(tokens) >= num_tokens:
            return tokens[:num_tokens], num_steps
    raise AssertionError


@pytest.mark.parametrize("rule", ["coupled", "naive"])
@pytest.mark.parametrize("shape", [Expansion((2, 1, 1)), Growth(4, 2, 2, 8)], ids=["static", "grown"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_llms_own(rule: Rule, shape: Expansion | Growth, temperature: float) -> None:
    """Token by token what it says alone, in fewer steps."""
    for seed in range(6):
        params = replace(PARAMS, temperature=temperature, rule=rule, seed=Seed(seed))
        tokens, num_steps = decode(params, shape, 40)
        assert tokens == decode_alone(LLM, PROMPT, params, 40)[0]
        assert num_steps < 40


def path_law(num_tokens: int) -> dict[tuple[int, ...], float]:
    """The LLM's own law of continuations."""
    law = {}
    for path in product(range(LLM.vocab_size), repeat=num_tokens):
        mass = 1.0
        for depth, token in enumerate(path):
            left = processed(LLM.logits([*PROMPT, *path[:depth]]), None, PARAMS)
            masses = np.exp(left.logp.astype(np.float64))
            mass *= float(masses[left.token_ids == token].sum() / masses.sum())
        if mass > 0.0:
            law[path] = mass
    return law


@pytest.mark.parametrize("rule", ["multi_step", "multi_step_iid"])
def test_draws_keep_the_llms_law(rule: Rule) -> None:
    """Two tokens of 500 seeds, drafts cut to a budget: chi-square, a false alarm once in 10^6; drafts are accepted."""
    law = path_law(2)
    counts: Counter[tuple[int, ...]] = Counter()
    num_steps = 0
    for seed in range(500):
        tokens, more = decode(replace(PARAMS, rule=rule, seed=Seed(seed)), Expansion((2, 2)), 2)
        counts[tokens] += 1
        num_steps += more
    assert counts.keys() <= law.keys()
    assert chi_square([counts[path] for path in law], list(law.values())) < chi_square_limit(len(law), 1e-6)
    assert num_steps < 1.9 * 500
