"""Tiny checkpoints that several files of tests share; nobody writes to them."""

from pathlib import Path

import pytest

from treecore.model.decoder import Decoder
from treecore.model.load import load_decoder
from treecore.testing.checkpoints import write_tiny_llama


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of four layers."""
    return write_tiny_llama(tmp_path_factory.mktemp("teacher"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama; here it is the SSM."""
    return write_tiny_llama(tmp_path_factory.mktemp("ssm") / "tiny", seed=3)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    """Ours."""
    return load_decoder(checkpoint, dtype="float32")
