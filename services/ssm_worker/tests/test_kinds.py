"""Each kind of SSM says what it needs, before it loads or connects to anything."""

import asyncio
from pathlib import Path

import pytest

from ssm_worker.kinds import serve
from ssm_worker.settings import SsmSettings
from treecore.errors import ConfigError
from treecore.service.settings import read_settings


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ([], "--ssm: an SSM of kind model needs"),
        (["--kind", "suffix"], "--teacher: an SSM of kind suffix needs"),
        (["--kind", "suffix", "--teacher", "/no/such/directory"], "config.json"),
        (["--kind", "oracle"], "--kind"),
        (["--kind", "suffix", "--min-match", "0"], "--min-match"),
    ],
)
async def test_what_is_missing_is_named(flags: list[str], match: str) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match=match):
        await serve(read_settings(SsmSettings, flags), asyncio.Event())


async def test_a_cache_of_no_block_is_refused(tmp_path: Path) -> None:
    """As at a worker with weights."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, '
        '"num_attention_heads": 1, "max_position_embeddings": 9, "rms_norm_eps": 1e-5}'
    )
    flags = ["--kind", "suffix", "--teacher", str(tmp_path), "--kv-tokens", "64", "--block-len", "65"]
    with pytest.raises(ConfigError, match="--kv-tokens is below --block-len 65"):
        await serve(read_settings(SsmSettings, flags), asyncio.Event())
