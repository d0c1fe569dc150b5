"""Tokens that a verifier has the device choose are those of the host's sampler, request by request."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from treecore.messages import RequestId, VerifyItem
from treecore.model.choosing import Chosen
from treecore.model.choosing_triton import choose_on_device
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.checkpoints import write_tiny_llama
from treecore.verify import answer_nodes

PARAMS = {
    RequestId("greedy"): SamplingParams(0.0, 0, 1.0, Seed(1)),
    RequestId("sampled"): SamplingParams(0.8, 0, 1.0, Seed(2**64 - 5)),
    RequestId("truncated"): SamplingParams(0.8, 5, 1.0, Seed(3)),
    RequestId("hardly warm"): SamplingParams(1e-60, 0, 1.0, Seed(4)),
}
PARENTS = [0, 0, 1, 1, 3]
PATHS = ((), (20,), (21,), (20, 22), (20, 23), (20, 22, 24))
NOTHING = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """On torch's attention: what is under test is the choice."""
    return load_decoder(write_tiny_llama(tmp_path_factory.mktemp("tiny")), dtype="float32")


def answers(decoder: Decoder, *, on_device: bool) -> dict[RequestId, list[int]]:
    """The tokens behind one tree of each request, all in one step."""
    held = HeldRequests(decoder, 32, 8, choose_tokens=choose_on_device if on_device else None)
    held.begin_step("test", ())
    for request_id, params in PARAMS.items():
        prompt = np.arange(3, 12, dtype=np.int32)
        assert held.take(VerifyItem(request_id, 0, 0, prompt, params, NOTHING, NOTHING, True)) is None
        assert held.extend(request_id, list(range(20, 25)), PARENTS)
    plain = {request_id for request_id, params in PARAMS.items() if params.is_plain}
    found = dict(zip(PARAMS, held.answer(list(PARAMS), plain), strict=True))
    assert {request_id for request_id, part in found.items() if isinstance(part, Chosen)} == (
        plain if on_device else set()
    )
    return {
        request_id: (
            part if isinstance(part, Chosen) else answer_nodes(part, PARAMS[request_id], held.paths(request_id, PATHS))
        ).tokens.tolist()
        for request_id, part in found.items()
    }


def test_the_device_chooses_what_the_host_would(decoder: Decoder) -> None:
    """Greedy and sampled requests on the device, one with top_k by its logits, in one batch."""
    assert answers(decoder, on_device=True) == answers(decoder, on_device=False)


def test_a_row_that_is_no_number_is_told() -> None:
    """As token -1."""
    logits = torch.zeros(3, 61)
    logits[1, 4] = float("nan")
    params = [PARAMS[RequestId("greedy")], PARAMS[RequestId("sampled")]]
    tokens = choose_on_device(logits, params, [np.array([9, 10]), np.array([9])])
    assert (tokens < 0).tolist() == [False, True, False]


@pytest.mark.parametrize(
    "changed",
    [
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"bias_ids": (3,), "biases": (1.0,)},
        {"min_tokens": 2, "end_token_ids": (2,)},
        {"num_logprobs": 0},
    ],
    ids=str,
)
def test_what_the_kernel_does_not_know_is_not_plain(changed: dict[str, object]) -> None:
    """The host computes such laws."""
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": Seed(1)}
    assert SamplingParams(**base).is_plain
    assert not SamplingParams(**{**base, **changed}).is_plain
