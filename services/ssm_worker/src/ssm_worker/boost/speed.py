"""What a token costs, incrementally decoded: the number that decides what drafting may cost. Knows decoders only."""

from statistics import median

import numpy as np

from treecore.messages import RequestId, VerifyItem
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.noise import Seed
from treecore.params import SamplingParams

_NO_TREE = np.empty(0, np.int32)
_REQUEST = RequestId("speed")
_BLOCK_LEN = 16


def token_ms(decoder: Decoder, context_len: int, num_tokens: int) -> float:
    """Median milliseconds of a forward for one token, over `num_tokens` of them behind `context_len` others."""
    total = min(context_len + num_tokens, decoder.spec.context_len)
    held = HeldRequests(decoder, -(-total // _BLOCK_LEN), _BLOCK_LEN)
    _read(held, 0, total - num_tokens)
    return median(_read(held, position, 1) for position in range(total - num_tokens, total))


def _read(held: HeldRequests, start: int, num_tokens: int) -> float:
    """Milliseconds of the forward for these tokens; which tokens they are does not matter."""
    held.begin_step("speed", ())
    params = SamplingParams(0.0, 0, 1.0, Seed(0)) if start == 0 else None
    item = VerifyItem(_REQUEST, start, start, np.ones(num_tokens, np.int32), params, _NO_TREE, _NO_TREE, True)
    refused = held.take(item)
    assert refused is None, "the cache has room for the whole measurement"
    held.compute([_REQUEST])
    return held.forward_ms
