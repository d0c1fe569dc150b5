"""Which device and kernels a decoder runs on: chosen once, at load. Imports triton only where it is chosen."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch

from treecore.errors import ConfigError
from treecore.model.attention import Attention, TorchAttention
from treecore.model.kv_pool import MoveRows, move_by_index
from treecore.model.linear import Precision
from treecore.model.spec import ModelSpec

AttentionName = Literal["auto", "torch", "triton"]
DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a decoder runs on. attention: `auto` is triton on CUDA, else torch. block_len: of the cache's blocks."""

    device: str = "cpu"
    attention: AttentionName = "auto"
    block_len: int = 16


@dataclass(frozen=True, slots=True)
class Backend:
    """What differs between devices: attention, and how rows of the cache are moved."""

    attention: Attention
    move_rows: MoveRows


def choose_device(name: DeviceName) -> str:
    """`auto` is CUDA where there is a device. Raises ConfigError where there is none and one is asked for."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device cuda: this machine has no CUDA device that torch can use")
    return "cuda" if has_cuda and name != "cpu" else "cpu"


def choose_backend(hardware: Hardware, spec: ModelSpec, group_size: int, precision: Precision) -> Backend:
    """The kernels for this rank's heads. Raises ConfigError for what cannot run."""
    name = hardware.attention
    if name == "auto":
        name = "triton" if precision.device.type == "cuda" and _has_triton() else "torch"
    if name == "torch":
        return Backend(TorchAttention(group_size, spec.attention_scale, spec.attention_soft_cap), move_by_index)
    if precision.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("attention triton: its kernels run on a CUDA device; use torch on a CPU")
    if not _has_triton():
        raise ConfigError("attention triton: the package triton is not installed")
    return _triton_backend(spec, group_size, precision, hardware.block_len)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_backend(spec: ModelSpec, group_size: int, precision: Precision, block_len: int) -> Backend:
    from treecore.model.attention_triton import TritonAttention  # noqa: PLC0415 - triton is an extra
    from treecore.model.kernels.attend import MAX_HEAD_DIM, Scoring  # noqa: PLC0415
    from treecore.model.kernels.compaction import move_rows  # noqa: PLC0415

    if spec.head_dim > MAX_HEAD_DIM:
        raise ConfigError(f"attention triton: heads of {spec.head_dim} numbers; at most {MAX_HEAD_DIM}")
    scoring = Scoring(spec.attention_scale, spec.attention_soft_cap)
    return Backend(TritonAttention(group_size, scoring, precision.activation, block_len), move_rows)
