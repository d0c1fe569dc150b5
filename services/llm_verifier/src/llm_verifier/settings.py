"""The verifier's settings: environment (ESPALIER_...) and flags."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import CliImplicitFlag

from treecore.service.settings import ServiceSettings


class VerifierSettings(ServiceSettings):
    """Flags of `python -m llm_verifier`."""

    model: Path = Field(description="directory of the LLM's checkpoint")
    name: str = Field("llm", description="the model's name as clients write it")
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_tokens: int = Field(65536, ge=64, description="tokens that the KV cache holds; memory is touched as it fills")
    block_len: int = Field(16, ge=1, description="tokens of a KV block")
    prefix_cache: CliImplicitFlag[bool] = Field(
        True, description="reuse the K and V of equal beginnings, across requests too"
    )
