"""The SSM worker's settings: environment (ESPALIER_...) and flags."""

from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import CliImplicitFlag

from treecore.model.backend import AttentionName, DeviceName
from treecore.service.settings import ServiceSettings

SHIPPED = "shipped:"


class SsmSettings(ServiceSettings):
    """Flags of `python -m ssm_worker`."""

    kind: Literal["model", "suffix"] = Field("model", description="a small model, or what repeats in the text so far")
    ssm: Path | None = Field(
        None, description="directory of the SSM's checkpoint, or shipped:NAME for one of this package (kind model)"
    )
    teacher: Path | None = Field(
        None,
        description="directory of the LLM; for an SSM that borrows its embedding or its vocabulary, and for suffix",
    )
    min_shared_vocab: float = Field(
        0.5, ge=0, le=1, description="share of the LLM's tokens that an SSM of another vocabulary must have too"
    )
    corpus: Path | None = Field(None, description='JSON Lines of {"text": "..."} to draft from too (kind suffix)')
    corpus_tokens: int = Field(262_144, ge=1, description="tokens of the corpus that are read; some 300 bytes each")
    min_match: int = Field(2, ge=1, description="tokens that must repeat before the next are drafted (kind suffix)")
    name: str = Field("ssm", description="the SSM's name; workers of one name are replicas")
    device: DeviceName = Field("auto", description="cpu or cuda; auto is cuda where there is a device (kind model)")
    attention: AttentionName = Field("auto", description="torch or triton; auto is triton on cuda, torch elsewhere")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_tokens: int = Field(65536, ge=64, description="tokens that the KV cache holds; memory is touched as it fills")
    block_len: int = Field(16, ge=1, description="tokens of a KV block")
    prefix_cache: CliImplicitFlag[bool] = Field(
        True, description="reuse the K and V of equal beginnings, across requests too"
    )

    @field_validator("ssm")
    @classmethod
    def _find_shipped(cls, ssm: Path | None) -> Path | None:
        if ssm is None or not (name := str(ssm)).startswith(SHIPPED):
            return ssm
        artefacts = Path(str(files("ssm_worker") / "artefacts"))
        known = {path.name: path for path in artefacts.iterdir() if path.is_dir()}
        if (wanted := name.removeprefix(SHIPPED)) not in known:
            raise ValueError(f"there is no {wanted!r} in this package, but: {', '.join(sorted(known))}")
        return known[wanted]
