"""Which backend is chosen, and what is refused where there is no GPU."""

from pathlib import Path

import pytest
import torch

from treecore.errors import ConfigError
from treecore.model.backend import Hardware, choose_device
from treecore.model.load import load_decoder
from treecore.testing.checkpoints import write_tiny_llama


def test_triton_is_refused_on_a_cpu(tmp_path: Path) -> None:
    """Interpreted, a step would take minutes."""
    with pytest.raises(ConfigError, match="attention triton"):
        load_decoder(write_tiny_llama(tmp_path), dtype="float32", on=Hardware(attention="triton"))


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And CUDA asked for by name is refused there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    assert choose_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="device cuda"):
        choose_device("cuda")


def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the CPU is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == "cuda"
    assert choose_device("cpu") == "cpu"
