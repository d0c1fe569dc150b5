"""`ChooseTokens` by the fused kernel. Knows parameters and keys; imports triton, so only its choice may import it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treecore.messages import Tokens
from treecore.model.batch import IntArray
from treecore.model.kernels.choose import Keys, choose_tokens
from treecore.params import SamplingParams


def choose_on_device(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[IntArray]) -> Tokens:
    """The tokens of plain requests, int32 [n]; -1 where a row is no number."""
    if len(logits) == 0:
        return np.empty(0, np.int32)
    counts = [len(part) for part in positions]
    seeds = np.repeat(np.array([each.seed for each in params], np.uint64), counts).view(np.int64)
    temperatures = np.repeat([_temperature(each) for each in params], counts)
    keys = Keys(
        seeds=torch.from_numpy(seeds).to(logits.device),
        positions=torch.from_numpy(np.concatenate(positions).astype(np.int32)).to(logits.device),
        temperatures=torch.from_numpy(temperatures).to(logits.device),
    )
    scores, tokens = choose_tokens(logits.contiguous(), keys)
    found: Tokens = torch.where(scores.isnan(), -1, tokens).cpu().numpy()
    return found


def _temperature(params: SamplingParams) -> np.float32:
    """0 for greedy alone: what fp32 would round to 0, or a GPU flush to it, is the smallest normal number."""
    return np.float32(0.0) if params.is_greedy else max(np.float32(params.temperature), np.finfo(np.float32).tiny)
