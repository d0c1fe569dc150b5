"""The request manager's settings: environment (ESPALIER_...) and flags."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliImplicitFlag

from treecore.service.settings import ServiceSettings

DYNAMIC = "dynamic"
_WIDTHS_OF_DRAWS = (2,)


class ManagerSettings(ServiceSettings):
    """Flags of `python -m request_manager`: gateway and manager in one process, or one of them."""

    role: Literal["combined", "gateway", "manager"] = Field(
        "combined", description="gateway: HTTP and text; manager: scheduling and trees; combined: both"
    )
    model: Path | None = Field(
        None, description="directory with the LLM's tokenizer and chat template (not for a manager)"
    )
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    tree: str = Field(
        DYNAMIC,
        description="the trees: 'dynamic' (shaped by what they cost and bring), <k1..km> as in 2,1; empty: none",
    )
    draft_ahead: CliImplicitFlag[bool] = Field(True, description="draft while the LLM verifies (dynamic trees)")
    max_tree_nodes: int = Field(64, ge=1, description="nodes of a tree, the root included")
    max_batch: int = Field(16, ge=1, description="requests in one step")
    max_waiting: int = Field(256, ge=1, description="requests that may wait; more are refused with 429")
    step_rows: int = Field(512, ge=1, description="tokens and nodes in one LLM step; prompts get what decoding leaves")
    max_pause_s: float = Field(600.0, gt=0, description="a request that gets no token for so long fails with 503")
    draft_deadline_s: float = Field(0.25, gt=0, description="how long a step waits for drafts")
    drain_timeout_s: float = Field(25.0, ge=0, description="how long a gateway that was told to stop finishes answers")

    @field_validator("tree")
    @classmethod
    def _is_tree(cls, value: str) -> str:
        if value != DYNAMIC and any(width < 1 for width in expansion_widths(value)):
            raise ValueError("widths must be at least 1")
        return value

    @model_validator(mode="after")
    def _has_tokenizer(self) -> "ManagerSettings":
        if self.role != "manager" and self.model is None:
            raise ValueError(f"--model: the role {self.role} needs the LLM's directory")
        return self

    @property
    def is_dynamic(self) -> bool:
        """Whether trees are shaped step by step."""
        return self.tree == DYNAMIC

    def widths(self) -> tuple[int, ...]:
        """The default expansion; with dynamic trees, of those whose rule needs draws."""
        return _WIDTHS_OF_DRAWS if self.is_dynamic else expansion_widths(self.tree)


def expansion_widths(text: str) -> tuple[int, ...]:
    """`2,1` -> (2, 1); raises ValueError."""
    return tuple(int(part) for part in text.split(",") if part.strip())
