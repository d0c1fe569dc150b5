"""The verifier's settings: environment (ESPALIER_...) and flags."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import CliImplicitFlag

from treecore.model.backend import AttentionName, DeviceName, OffloadName
from treecore.service.settings import ServiceSettings


class GroupSettings(ServiceSettings):
    """How many ranks there are and which one this is. A LeaderWorkerSet or a StatefulSet tells most of it."""

    tensor_parallel_size: int = Field(1, ge=1, le=64, description="ranks that split each layer")
    pipeline_parallel_size: int = Field(1, ge=1, le=64, description="stages that split the layers")
    rank: int | None = Field(None, ge=0, description="this process's rank (default: LWS_WORKER_INDEX, or the ordinal)")
    ranks_per_pod: int = Field(1, ge=1, le=64, description="consecutive ranks that a pod has, a process each")
    local_rank: int | None = Field(
        None, ge=0, description="which of its pod's ranks this process is; absent: it starts them all"
    )
    rendezvous: str | None = Field(None, description="host:port where rank 0 waits (default: LWS_LEADER_ADDRESS)")
    group_service: str | None = Field(None, description="headless service of the StatefulSet that runs the ranks")
    group_port: int = Field(7800, ge=1, le=65535, description="port of the rendezvous where its host is found")
    group_timeout_s: float = Field(60, ge=1, description="longest wait in a collective, and longest silence of a rank")
    rendezvous_timeout_s: float = Field(600, ge=1, description="how long ranks wait for the group to be complete")
    group_generation: str = Field(
        "", description="ranks of different generations form no group, e.g. a revision's hash"
    )


class VerifierSettings(GroupSettings):
    """Flags of `python -m llm_verifier`."""

    model: Path = Field(description="directory of the LLM's checkpoint")
    name: str = Field("llm", description="the model's name as clients write it")
    device: DeviceName = Field("auto", description="cpu or cuda; auto is cuda where there is a device")
    attention: AttentionName = Field("auto", description="torch or triton; auto is triton on cuda, torch elsewhere")
    cuda_graphs: CliImplicitFlag[bool] = Field(
        False, description="replay small steps as CUDA graphs; needs attention triton; not run on hardware yet"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_invariant: CliImplicitFlag[bool] = Field(
        False, description="logits with the same bits alone, in a tree and in any batch; slower"
    )
    offload: OffloadName = Field("none", description="where layers wait for their turn: cpu (of a GPU's host) or disk")
    offload_resident_layers: int = Field(0, ge=0, description="first layers that stay in memory all the same")
    kv_tokens: int = Field(65536, ge=64, description="tokens that the KV cache holds; memory is touched as it fills")
    block_len: int = Field(16, ge=1, description="tokens of a KV block")
    prefix_cache: CliImplicitFlag[bool] = Field(
        True, description="reuse the K and V of equal beginnings, across requests too"
    )
