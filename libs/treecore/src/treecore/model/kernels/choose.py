"""The token behind each node, on the device: x_t = argmax(log p + G), or argmax(log p) where temperature is 0.

The same tokens as treecore.sampling's, from logits that never leave the device, for requests that have no more than a
temperature and a seed (architecture section 4). Knows logits, keys and vocabulary shards; must not know requests.

Each shard gives a (score, token) pair a row; `best_pairs` merges pairs of parts and of shards by one rule: the highest
score, among equals the lowest token. Noise is Philox4x32-10, G computed in float64 and rounded to fp32 as numpy does.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from treecore.model.kernels.check import check_tensor
from treecore.noise import GUMBEL_MAX, GUMBEL_MIN

_PART = 4096  # tokens of a program
_HOPELESS = tl.constexpr(GUMBEL_MIN - GUMBEL_MAX)  # log p of a token that no noise brings up to the likeliest one
_NO_TOKEN = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True)
class Keys:
    """What each row's token depends on beside its logits, on the device.

    seeds: int64 [R], the unsigned seed's bits. positions: int32 [R], of the tokens to be chosen. temperatures: fp32
    [R], 0 for greedy.
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor


@triton.jit
def choose_kernel(
    logits_ptr,  # fp32 [R, V]
    tops_ptr,  # fp32 [R]: each row's largest logit over the whole vocabulary
    seeds_ptr,  # int32 [R, 2]: low and high half
    positions_ptr,  # int32 [R]
    temperatures_ptr,  # fp32 [R]
    scores_ptr,  # fp32 [R, num_parts]
    tokens_ptr,  # int32 [R, num_parts]
    vocab,
    first_token,
    BLOCK: tl.constexpr,
):
    """The best token of one row and of BLOCK counters, four tokens each."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    counter = first_token // 4 + part * BLOCK + tl.arange(0, BLOCK)
    logits = logits_ptr + row.to(tl.int64) * vocab
    top = tl.load(tops_ptr + row)
    zero = counter * 0
    position = zero + tl.load(positions_ptr + row)
    low = tl.load(seeds_ptr + row * 2).to(tl.uint32, bitcast=True)
    high = tl.load(seeds_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
    b0, b1, b2, b3 = tl.philox_impl(_bits(counter), _bits(position), _bits(zero), _bits(zero), low, high)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    best, token = _lane(best, token, counter * 4, b0, logits, top, temperature, vocab, first_token)
    best, token = _lane(best, token, counter * 4 + 1, b1, logits, top, temperature, vocab, first_token)
    best, token = _lane(best, token, counter * 4 + 2, b2, logits, top, temperature, vocab, first_token)
    best, token = _lane(best, token, counter * 4 + 3, b3, logits, top, temperature, vocab, first_token)
    score = tl.max(best, 0)
    place = row * tl.num_programs(1) + part
    tl.store(scores_ptr + place, score)
    tl.store(tokens_ptr + place, tl.min(tl.where(best == score, token, _NO_TOKEN), 0))


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _lane(best, token, candidate, bits, logits, top, temperature, vocab, first_token):
    """`best` and `token` after one more candidate each, in ascending order of tokens: an equal one changes nothing."""
    column = candidate - first_token
    is_inside = (column >= 0) & (column < vocab)
    logit = tl.load(logits + column, mask=is_inside, other=float("-inf"))
    score = logit
    if temperature > 0.0:
        logp = tl.div_rn(logit - top, tl.zeros_like(logit) + tl.maximum(temperature, 1.1754943508222875e-38))
        score = logp
        if tl.max(logp, 0) >= _HOPELESS:
            uniform = ((bits >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08
            score = logp + (-tl.log(-tl.log(uniform))).to(tl.float32)
    is_better = score > best
    return tl.where(is_better, score, best), tl.where(is_better, candidate, token)


def choose_tokens(
    logits: Tensor, keys: Keys, tops: Tensor | None = None, first_token: int = 0
) -> tuple[Tensor, Tensor]:
    """Scores fp32 [R] and tokens int32 [R] of the best token of each row, among tokens first_token .. + V - 1.

    logits: fp32 [R, V], one shard of the vocabulary. tops: fp32 [R], the largest logit of each row over all shards;
    None where there is one shard. A row with a NaN has the score NaN. Raises ValueError naming what does not fit.
    """
    check_tensor("logits", logits, ndim=2, dtypes=(torch.float32,))
    num_rows, vocab = logits.shape
    tops = logits.amax(dim=1) if tops is None else tops
    _check(logits, keys, tops)
    num_parts = triton.cdiv(vocab + first_token % 4, _PART)
    scores = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):
        choose_kernel[(num_rows, num_parts)](
            logits,
            tops,
            keys.seeds.view(torch.int32),
            keys.positions,
            keys.temperatures,
            scores,
            tokens,
            vocab,
            first_token,
            BLOCK=_PART // 4,
            num_warps=4,
        )
    best, token = best_pairs(scores, tokens)
    return torch.where(tops.isnan(), tops, best), token


def best_pairs(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The merge rule, over the last dimension: the highest score, among equals the lowest token."""
    best = scores.amax(dim=-1, keepdim=True)
    lowest = torch.where(scores == best, tokens, _NO_TOKEN.value).amin(dim=-1)
    return best.squeeze(-1), lowest.to(torch.int32)


def _check(logits: Tensor, keys: Keys, tops: Tensor) -> None:
    shape = (len(logits),)
    check_tensor("keys.seeds", keys.seeds, shape=shape, dtypes=(torch.int64,), like=logits)
    check_tensor("keys.positions", keys.positions, shape=shape, dtypes=(torch.int32,), like=logits)
    check_tensor("keys.temperatures", keys.temperatures, shape=shape, dtypes=(torch.float32,), like=logits)
    check_tensor("tops", tops, shape=shape, dtypes=(torch.float32,), like=logits)
