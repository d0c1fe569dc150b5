"""The real tokenizer: 49,152 tokens, merges that cross every border of JSON."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from espalier_local.cache import ModelCache
from espalier_local.models import SMOLLM2
from treecore.errors import InvalidRequest
from treecore.grammar import GrammarCompiler
from treecore.params import Grammar

pytestmark = pytest.mark.weights

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """Two ends, and a head with padding."""
    return GrammarCompiler.from_dir(_model_dir(), 49_216, [0, 2])


def _model_dir() -> Path:
    return ModelCache.from_environment().model_dir(SMOLLM2.name)


@pytest.mark.parametrize("seed", range(3))
def test_any_allowed_tokens_make_a_valid_answer(compiler: GrammarCompiler, seed: int) -> None:
    """Trees of random siblings at every step; the accepted path is JSON, and padding is never allowed."""
    rng, state = random.Random(seed), compiler.start(Grammar("json_schema", json.dumps(_SCHEMA)))
    output: list[int] = []
    while not (row := state.masks(output, [()])[0])[[0, 2]].all():
        allowed = np.flatnonzero(row).tolist()
        assert max(allowed) < 49_152
        below = [(token,) for token in rng.sample(allowed, min(8, len(allowed)))]
        assert state.masks(output, below).any(axis=1).all()
        output += below[0]
        assert len(output) < 100
    text = Tokenizer.from_file(str(_model_dir() / "tokenizer.json")).decode(output)
    answer = json.loads(text)
    assert answer.keys() == {"name", "age"}
    assert len(answer["name"]) <= 12
    assert 0 <= answer["age"] <= 120


def test_a_branch_that_cannot_be_followed_closes_itself_alone(compiler: GrammarCompiler) -> None:
    """No token of this vocabulary has the byte 0x04: behind a drafted "z" nothing can follow, and only there.

    Once "z" is output, that is a typed error, with speculation as without.
    """
    tokenizer = Tokenizer.from_file(str(_model_dir() / "tokenizer.json"))
    dead, alive = tokenizer.encode("z").ids, tokenizer.encode("y").ids
    state = compiler.start(Grammar("choice", '["yes", "z\\u0004"]'))
    masks = state.masks([], [(), tuple(dead), tuple(alive)])
    assert masks.any(axis=1).tolist() == [True, False, True]
    with pytest.raises(InvalidRequest, match="any further") as failure:
        state.masks(dead, [()])
    assert failure.value.reason == "grammar_failed"


def test_a_tree_never_fails_where_its_path_does_not(compiler: GrammarCompiler) -> None:
    """An expensive regular expression: all branches together exceed the budget that each alone keeps."""
    rng, state = random.Random(0), compiler.start(Grammar("regex", "[a-z ]*[ae][a-z ]{40}"))
    output: list[int] = []
    for _ in range(6):
        allowed = np.flatnonzero(state.masks(output, [()])[0]).tolist()
        below: list[tuple[int, ...]] = [(), *[(token,) for token in rng.sample(allowed, 3)]]
        for path in below[1:4]:
            row = state.masks(output, [path])[0]
            below += [(*path, token) for token in rng.sample(np.flatnonzero(row).tolist(), 3)]
        together = state.masks(output, below)
        alone = [compiler.start(Grammar("regex", "[a-z ]*[ae][a-z ]{40}")).masks(output, [path])[0] for path in below]
        assert (together == np.stack(alone)).all()
        output += below[1]
