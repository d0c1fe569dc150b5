"""Compiles kernels for GPUs that are not here, and reads what the machine code needs. Knows triton's compiler only."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as _nvidia
from triton.compiler import ASTSource

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""What a block may have, by compute capability. The compiler does not check it."""


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One specialisation of a kernel. signature: triton type of each argument, "constexpr" where `constants` has it."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one cubin. has_wgmma: the tensor cores of sm_90 in their own way (HGMMA). barriers: of the whole block."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int
    has_wgmma: bool
    barriers: int


def compile_for(variant: Specialisation, capability: int) -> Resources:
    """Machine code of `variant` for sm_`capability`, by the ptxas that triton brings."""
    aligned = {
        (idx,): [["tt.divisibility", 16]] for idx, kind in enumerate(variant.signature.values()) if kind.startswith("*")
    }
    source = ASTSource(
        variant.kernel, signature=dict(variant.signature), constexprs=dict(variant.constants), attrs=aligned
    )
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=target, options=options)
    return _resources(compiled, capability)


def _resources(compiled: Any, capability: int) -> Resources:
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as directory:
        ptx, cubin = Path(directory) / "kernel.ptx", Path(directory) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        told = _tool(
            "ptxas", "-v", f"--gpu-name=sm_{capability}{suffix}", str(ptx), "-o", str(Path(directory) / "again")
        )
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        code = _tool("nvdisasm", str(cubin))
    return Resources(
        registers=_number(r"REG:(\d+)", usage),
        stack_bytes=_number(r"STACK:(\d+)", usage),
        spilled_bytes=_number(r"(\d+) bytes spill stores", told) + _number(r"(\d+) bytes spill loads", told),
        shared_bytes=int(compiled.metadata.shared),
        has_wgmma="HGMMA" in code,
        barriers=len(re.findall(r"\bBAR\.SYNC", code)),
    )


def _tool(name: str, *arguments: str) -> str:
    command = [str(Path(_nvidia).parent / "bin" / name), *arguments]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return found.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in:\n{text}"
    return int(found[1])
