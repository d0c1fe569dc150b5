"""The memory of the KV cache. Knows slots and layers; must not know requests, blocks or trees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treecore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's K and V take at one rank: its layers, and its KV heads of each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Slots(Protocol):
    """Slots that rows can be moved between: a KvPool, or those of a group of ranks."""

    @property
    def num_slots(self) -> int: ...  # noqa: D102 - see KvPool

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None: ...  # noqa: D102


MoveRows = Callable[[Tensor, NDArray[np.int64], NDArray[np.int64]], None]


def move_by_index(kv: Tensor, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
    """`KvPool.move` by torch's own indexing, on any device."""
    src, dst = (torch.from_numpy(slots).to(kv.device) for slots in (src_slots, dst_slots))
    kv[:, dst] = kv[:, src]


class KvPool:
    """K and V of `num_slots` tokens in all layers, one slot a token.

    `kv` is [num_layers, num_slots + num_spare, 2, num_kv_heads, head_dim], K before V, so that both are written and
    gathered in one go. Memory is not touched before it is written: an unused slot costs no RAM and may hold anything,
    NaN included. Behind the `num_slots` that can be given to requests lie `num_spare` for rows that are nobody's.
    """

    def __init__(
        self,
        shape: KvShape,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        move_rows: MoveRows = move_by_index,
        *,
        num_spare: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self._move_rows = move_rows
        try:
            size = (shape.num_layers, num_slots + num_spare, 2, shape.num_kv_heads, shape.head_dim)
            self.kv = torch.empty(size, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's allocators raise nothing more exact on all devices
            raise ConfigError(f"a KV cache of {num_slots} tokens does not fit into memory: {error}") from error

    def layer(self, layer_idx: int) -> Tensor:
        """A view of one layer: [num_slots + num_spare, 2, num_kv_heads, head_dim]."""
        return self.kv[layer_idx]

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Copies K and V of src_slots[i] to dst_slots[i] in all layers, as if all were read before any is written."""
        assert src_slots.shape == dst_slots.shape, "as many sources as destinations"
        with torch.inference_mode():
            self._move_rows(self.kv, src_slots, dst_slots)
