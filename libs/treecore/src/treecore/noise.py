"""Counter-based noise keyed by (seed, position, token): Philox4x32-10 and Gumbel (architecture section 4).

Nothing here has state: the same key gives the same number in any process, batch or retry.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import math
from typing import NewType

import numpy as np
from numpy.typing import NDArray

Seed = NewType("Seed", int)

LANES = 4
TOKEN_STREAM = 0  # x_t, and under multi_step the draws from p alone
CHOICE_STREAM = 1
DRAFT_STREAM = 2  # an SSM's draws of children (multi_step)
ACCEPT_STREAM = 3  # whether a try is accepted (multi_step)
RESIDUAL_STREAM = 4  # what follows where no try was accepted (multi_step)

# u lies in [2^-25, 1 - 2^-25], so Gumbel noise is bounded; sampling prunes by these bounds (rounded outwards).
GUMBEL_MIN = -2.853
GUMBEL_MAX = 17.329

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10
_DENSE_KEYS = 1 << 22


def philox(seed: int, counters: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Philox4x32-10 blocks. counters: uint64 [n, 4], each below 2^32; returns uint32 [n, 4]."""
    lanes = np.ascontiguousarray(counters.T)
    even, odd = lanes[::2], lanes[1::2]  # two at a time: for a few hundred blocks the calls are the cost
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)[:, None]
    for _ in range(_ROUNDS):
        products = even * _MULTIPLIERS
        even = (products >> _HALF)[::-1] ^ odd ^ key
        odd = (products & _LOW)[::-1]
        key = (key + _WEYL) & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1).astype(np.uint32)


def philox_block(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """One block of `philox`, in Python's integers: for one or two, numpy's calls cost twenty times as much."""
    low = 0xFFFFFFFF
    left, below, right, beside = counter
    key, other = seed & low, seed >> 32
    for _ in range(_ROUNDS):
        first, second = left * 0xD2511F53, right * 0xCD9E8D57
        left, below = (second >> 32) ^ below ^ key, second & low
        right, beside = (first >> 32) ^ beside ^ other, first & low
        key, other = (key + 0x9E3779B9) & low, (other + 0xBB67AE85) & low
    return left, below, right, beside


def uniform(seed: Seed, position: int, stream: int, draw_idx: int, source: int = 0) -> float:
    """U(seed, position, stream, source, draw) in [2^-53, 1 - 2^-53], 52 bits; two draws share a block."""
    block = philox_block(seed, (draw_idx // 2, position, stream, source))
    high, low = block[2 * (draw_idx % 2)], block[2 * (draw_idx % 2) + 1]
    return ((high >> 6 << 26 | low >> 6) + 0.5) * 2.0**-52


def gumbel(seed: Seed, positions: int | NDArray[np.integer], token_ids: NDArray[np.integer]) -> NDArray[np.float32]:
    """G(seed, position, token) for each of `token_ids` (any order), float32 [n].

    positions: one for all tokens, or one a token. u = ((bits >> 8) + 0.5) * 2^-24 needs 25 bits, so u and both
    logarithms are float64; only the result is rounded.
    """
    blocks, where = _distinct(np.broadcast_to(positions, token_ids.shape), token_ids // LANES)
    counters = np.zeros((len(blocks), LANES), np.uint64)
    counters[:, 0], counters[:, 1], counters[:, 2] = blocks[:, 1], blocks[:, 0], TOKEN_STREAM
    bits = philox(seed, counters)[where, token_ids % LANES]
    uniform = ((bits >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    noise: NDArray[np.float32] = -np.log(-np.log(uniform)).astype(np.float32)
    return noise


def gumbel_at(seed: Seed, position: int, token_id: int) -> float:
    """`gumbel` of one token, but not rounded to float32: for a few tokens, numpy's calls cost more than the noise."""
    bits = philox_block(seed, (token_id // LANES, position, TOKEN_STREAM, 0))[token_id % LANES]
    return -math.log(-math.log(((bits >> 8) + 0.5) * 2.0**-24))


def choice_seed(seed: Seed, choice_idx: int) -> Seed:
    """The seed of the `choice_idx`-th of n choices; choice 0 keeps the request's own, so it can be replayed alone."""
    if choice_idx == 0:
        return seed
    block = philox(seed, np.array([[choice_idx, 0, CHOICE_STREAM, 0]], np.uint64))[0]
    return Seed(int(block[0]) | int(block[1]) << 32)


def _distinct(
    positions: NDArray[np.integer], blocks: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """The distinct (position, block) pairs, int [m, 2], and which of them each entry is: four tokens share one."""
    if len(blocks) == 0:
        return np.empty((0, 2), np.int64), blocks
    first, stride = int(positions.min()), int(blocks.max()) + 1
    keys = (positions - first).astype(np.int64) * stride + blocks
    distinct, where = _ranked(keys)
    return np.stack([distinct // stride + first, distinct % stride], axis=1), where


def _ranked(keys: NDArray[np.int64]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """As np.unique with its inverse; without sorting where the keys are dense, as those of one tree are."""
    if int(keys.max()) >= _DENSE_KEYS:
        return np.unique(keys, return_inverse=True)
    used = np.zeros(int(keys.max()) + 1, np.bool_)
    used[keys] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[keys]
