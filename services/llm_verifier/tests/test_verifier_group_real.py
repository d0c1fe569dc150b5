"""SmolLM2 in a 2x2 group of processes: the tokens of one process, fp32. Its 9 heads and 3 KV heads do not divide."""

import numpy as np
import pytest

from espalier_local.cache import ModelCache
from llm_verifier.engine import Engine
from llm_verifier.group.testing import running_group
from treecore.messages import RequestId, VerifyItem, VerifyRequest, WorkerId
from treecore.model.held import Forwards, HeldRequests, P
from treecore.model.load import load_decoder
from treecore.params import SamplingParams, Seed

pytestmark = pytest.mark.weights

BLOCK_LEN, NUM_BLOCKS, NUM_TOKENS = 16, 64, 16
PROMPTS = {"greedy": [1, 504, 3575, 282, 4649, 314], "sampled": [1, 19161, 253, 1838], "long": list(range(400, 500))}
PARAMS = {
    "greedy": SamplingParams(0.0, 0, 1.0, Seed(0)),
    "sampled": SamplingParams(0.8, 0, 0.95, Seed(3)),
    "long": SamplingParams(1.0, 0, 1.0, Seed(4)),
}


def generated(decoder: Forwards[P]) -> dict[str, list[int]]:
    """All prompts together, token by token; each step asks behind a draft of two nodes as well."""
    held = HeldRequests(decoder, NUM_BLOCKS, BLOCK_LEN)
    engine = Engine(WorkerId("v"), held, decoder.spec.vocab_size)
    texts, starts = {name: list(prompt) for name, prompt in PROMPTS.items()}, dict.fromkeys(PROMPTS, 0)
    for _ in range(NUM_TOKENS):
        reply = engine.step(VerifyRequest("me", (), tuple(item(name, texts[name], starts[name]) for name in texts)))
        assert not reply.refused
        for answer in reply.items:
            starts[answer.request_id] = len(texts[answer.request_id])
            texts[answer.request_id].append(int(answer.tokens[0]))
    return texts


def item(name: str, tokens: list[int], start: int) -> VerifyItem:
    """One request's part of a step, with two children of the root."""
    params = PARAMS[name] if start == 0 else None
    tree = np.array([28, 260], np.int32), np.array([0, 0], np.int32)
    return VerifyItem(RequestId(name), 0, start, np.array(tokens[start:], np.int32), params, *tree, True)


def test_smollm2_in_four_processes() -> None:
    """Greedy and sampled, in one batch that is cut into micro-batches."""
    model = ModelCache.from_environment().model_dir("smollm2-135m-instruct")
    wanted = generated(load_decoder(model, dtype="float32"))
    with running_group(model, 2, 2) as group:
        assert generated(group.decoder) == wanted
