"""Which device and kernels a decoder runs on: chosen once, at load. Imports triton only where it is chosen."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch

from treecore.errors import ConfigError
from treecore.model.attention import Attention, TorchAttention
from treecore.model.attention_invariant import InvariantAttention
from treecore.model.choosing import ChooseTokens
from treecore.model.kv_pool import MoveRows, move_by_index
from treecore.model.linear import Precision
from treecore.model.parallel import HeadShare, Place
from treecore.model.spec import ModelSpec

AttentionName = Literal["auto", "torch", "triton"]
DeviceName = Literal["auto", "cpu", "cuda"]
OffloadName = Literal["none", "cpu", "disk"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a decoder runs on. attention: `auto` is triton on CUDA, else torch. block_len: of the cache's blocks.

    batch_invariant: a row's logits have the same bits alone, in a tree, in a batch and in any chunk of a prefill.
    offload: where layers are while they do not compute, the first `offload_resident_layers` excepted (docs/offload.md).
    """

    device: str = "cpu"
    attention: AttentionName = "auto"
    block_len: int = 16
    batch_invariant: bool = False
    offload: OffloadName = "none"
    offload_resident_layers: int = 0


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


def choose_backend(hardware: Hardware, spec: ModelSpec, heads: HeadShare, precision: Precision) -> Backend:
    """The kernels for this rank's heads. Raises ConfigError for what cannot run."""
    if not uses_triton(hardware):
        return Backend(_torch_attention(hardware, spec, heads), move_by_index)
    if precision.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("attention triton: its kernels run on a CUDA device; use torch on a CPU")
    if not _has_triton():
        raise ConfigError("attention triton: the package triton is not installed")
    return _triton_backend(hardware, spec, heads, precision)


def check_place(hardware: Hardware, place: Place) -> None:
    """Raises ConfigError where bits would depend on the batch although they must not."""
    if hardware.batch_invariant and place.tp_size > 2:
        raise ConfigError("batch_invariant: at most 2 tensor-parallel ranks, since the order of longer sums may vary")


def _torch_attention(hardware: Hardware, spec: ModelSpec, heads: HeadShare) -> Attention:
    if hardware.batch_invariant:
        return InvariantAttention(len(heads.kv), spec.attention_scale, spec.attention_soft_cap)
    return TorchAttention(heads.group_size, spec.attention_scale, spec.attention_soft_cap)


def uses_triton(hardware: Hardware) -> bool:
    """Whether our kernels are chosen."""
    if hardware.attention == "auto":
        return hardware.device.startswith("cuda") and _has_triton()
    return hardware.attention == "triton"


def token_chooser(hardware: Hardware) -> ChooseTokens | None:
    """How tokens are chosen on the device; None where the host is to choose them. After choose_backend."""
    if not uses_triton(hardware):
        return None
    from treecore.model.choosing_triton import choose_on_device  # noqa: PLC0415 - triton is an extra

    return choose_on_device


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_backend(hardware: Hardware, spec: ModelSpec, heads: HeadShare, precision: Precision) -> Backend:
    from treecore.model.attention_triton import TritonAttention  # noqa: PLC0415 - triton is an extra
    from treecore.model.kernels.attend import MAX_HEAD_DIM, Scoring  # noqa: PLC0415
    from treecore.model.kernels.compaction import move_rows  # noqa: PLC0415
    from treecore.model.kernels.work import Variant  # noqa: PLC0415

    if spec.head_dim > MAX_HEAD_DIM:
        raise ConfigError(f"attention triton: heads of {spec.head_dim} numbers; at most {MAX_HEAD_DIM}")
    scoring = Scoring(spec.attention_scale, spec.attention_soft_cap)
    variant: Variant = "invariant" if hardware.batch_invariant else "fast"
    attention = TritonAttention(heads.group_size, scoring, precision.activation, hardware.block_len, variant)
    return Backend(attention, move_rows)
