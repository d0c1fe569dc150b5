"""What a verifier refuses to serve before it meets a broker."""

import asyncio
from pathlib import Path

import pytest
import torch

from llm_verifier.settings import VerifierSettings
from llm_verifier.worker import serve
from treecore.errors import ConfigError
from treecore.testing.checkpoints import TINY, random_tensors, write_checkpoint


async def test_a_trimmed_head_is_refused(tmp_path: Path) -> None:
    """Its column v is not token v, so it could only verify wrongly."""
    config = {**TINY, "espalier": {"head_token_ids": True}}
    head = {"espalier.head_token_ids": torch.tensor([3, 60, 5], dtype=torch.int32)}
    write_checkpoint(tmp_path / "draft", config, {**random_tensors(config, 0), **head})
    with pytest.raises(ConfigError, match="cannot verify"):
        await serve(VerifierSettings(model=tmp_path / "draft"), asyncio.Event())


async def test_a_model_that_gives_no_numbers_is_refused(tmp_path: Path) -> None:
    """By the name of its checkpoint, before a request meets it."""
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in random_tensors(TINY, 0).items()}
    write_checkpoint(tmp_path / "broken", TINY, broken)
    with pytest.raises(ConfigError, match=r"broken: the model's logits are not numbers"):
        await serve(VerifierSettings(model=tmp_path / "broken"), asyncio.Event())
