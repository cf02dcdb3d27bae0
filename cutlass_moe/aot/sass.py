"""What a compiled kernel uses, read from its cubin with cuobjdump and nvdisasm (on the PATH, or from NVIDIA's wheels)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cutlass_moe.aot.locations import nvidia_wheel_files

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """Resources of one cubin. A cubin of several kernels counts the largest of each size, and the sum of each instruction.

    Attributes:
        registers: registers a thread, as allocated at launch (`setmaxregister` moves them between warpgroups later).
        stack_bytes, local_bytes: stack frame and local memory a thread; register spills live there.
        static_shared_bytes: shared memory fixed at compile time. What a launch adds is not in a cubin.
        spill_loads, spill_stores: local memory instructions (LDL, STL).
        hgmma: warpgroup matrix instructions.
        bulk_loads: tensor loads by the TMA (UTMALDG).
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    static_shared_bytes: int
    spill_loads: int
    spill_stores: int
    hgmma: int
    bulk_loads: int


def find_tool(name: str) -> Path | None:
    """Path of a CUDA binary tool, or None when it is neither on the PATH nor in an installed nvidia wheel."""
    found = shutil.which(name)
    return Path(found) if found else next(iter(nvidia_wheel_files(f"*/bin/{name}")), None)


def can_inspect() -> bool:
    """Whether both disassemblers are installed."""
    return find_tool("cuobjdump") is not None and find_tool("nvdisasm") is not None


def inspect_cubin(cubin: Path) -> Resources:
    """Reads the resources of every kernel in a cubin. Raises RuntimeError when a tool is missing or fails."""
    usage = parse_usage(_run("cuobjdump", "-res-usage", str(cubin)))
    if not usage:
        raise RuntimeError(f"cuobjdump found no kernel in {cubin}")
    counts = count_instructions(disassemble(cubin))
    registers, stack, shared, local = (max(column) for column in zip(*usage, strict=True))
    return Resources(
        registers=registers,
        stack_bytes=stack,
        local_bytes=local,
        static_shared_bytes=shared,
        spill_loads=counts["LDL"],
        spill_stores=counts["STL"],
        hgmma=counts["HGMMA"],
        bulk_loads=counts["UTMALDG"],
    )


def disassemble(cubin: Path) -> str:
    """SASS of a cubin, as text."""
    return _run("nvdisasm", "-c", str(cubin))


def parse_usage(text: str) -> list[tuple[int, int, int, int]]:
    """(registers, stack, shared, local) of each kernel in the output of `cuobjdump -res-usage`."""
    return [(int(r), int(stack), int(shared), int(local)) for r, stack, shared, local in _USAGE.findall(text)]


def count_instructions(sass: str) -> Counter[str]:
    """How often each opcode occurs in SASS text, modifiers after the first dot left out."""
    return Counter(_INSTRUCTION.findall(sass))


def _run(tool: str, *arguments: str) -> str:
    path = find_tool(tool)
    if path is None:
        raise RuntimeError(f"{tool} is not installed: put it on the PATH, or `pip install nvidia-cuda-{tool}`")
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{path} {' '.join(arguments)} failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
