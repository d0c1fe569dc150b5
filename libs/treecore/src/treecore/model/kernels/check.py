"""What launchers demand of a tensor before a kernel reads through its pointer."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int] | None = None,
    ndim: int | None = None,
    dtypes: Sequence[torch.dtype],
    like: Tensor | None = None,
) -> None:
    """Raises ValueError naming the argument unless it is contiguous and has this shape (-1: any), dtype and device."""
    if ndim is not None and tensor.ndim != ndim:
        raise ValueError(f"{name}: {tensor.ndim} dimensions, expected {ndim}")
    if shape is not None and not _fits(tuple(tensor.shape), tuple(shape)):
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} are not contiguous")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: on {tensor.device}, expected {like.device}")


def _fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(found) == len(wanted) and all(want in (size, -1) for size, want in zip(found, wanted, strict=True))
