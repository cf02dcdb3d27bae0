"""What a compiled kernel uses, read from its cubin with cuobjdump and nvdisasm (PATH or NVIDIA's wheels)."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cutlass_moe.aot.locations import nvidia_wheel_files

_ELF = b"\x7fELF\x02"  # of 64 bits
_MACHINE_CUDA = 190
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """Resources of a cubin. Of several kernels in it: the largest of each size, the sum of each count.

    Attributes:
        registers: registers a thread, as at launch (`setmaxregister` moves them between warps later).
        stack_bytes, local_bytes: stack frame and local memory a thread; register spills live there.
        static_shared_bytes: shared memory fixed at compile time. What a launch adds is not in a cubin.
        spill_loads, spill_stores: local memory instructions (LDL, STL).
        hgmma: warpgroup matrix instructions.
        hgmma_waits: instructions that order them (WARPGROUP.ARRIVE, .DEPBAR): two for each where ptxas found that it
            cannot overlap them.
        bulk_loads: tensor loads by the TMA (UTMALDG).
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    static_shared_bytes: int
    spill_loads: int
    spill_stores: int
    hgmma: int
    hgmma_waits: int
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
        hgmma_waits=counts["WARPGROUP"],
        bulk_loads=counts["UTMALDG"],
    )


def disassemble(cubin: Path) -> str:
    """SASS of a cubin, as text."""
    return _run("nvdisasm", "-c", str(cubin))


def disassemble_embedded(library: Path, cubin_sha256: str) -> str:
    """SASS of a kernel inside a library. Raises RuntimeError when it is not there or nvdisasm is missing."""
    code = embedded_cubin(library.read_bytes(), cubin_sha256)
    if code is None:
        raise RuntimeError(f"{library} holds no cubin of SHA-256 {cubin_sha256}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return disassemble(Path(file.name))


def embedded_cubin(library: bytes, cubin_sha256: str) -> bytes | None:
    """The cubin of this hash inside a library (cubins are ELF images within its data), or None."""
    start = library.find(_ELF, 1)
    while start != -1:
        header = library[start : start + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == _MACHINE_CUDA:
            segments, sections = struct.unpack_from("<QQ", header, 32)
            segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from("<4H", header, 54)
            size = max(segments + segment_bytes * segment_count, sections + section_bytes * section_count)
            code = library[start : start + size]
            if hashlib.sha256(code).hexdigest() == cubin_sha256:
                return code
        start = library.find(_ELF, start + 1)
    return None


def parse_usage(text: str) -> list[tuple[int, int, int, int]]:
    """(registers, stack, shared, local) of each kernel in the output of `cuobjdump -res-usage`."""
    return [(int(r), int(stack), int(shared), int(local)) for r, stack, shared, local in _USAGE.findall(text)]


def opcodes(sass: str) -> list[str]:
    """The opcodes in SASS text, in order, modifiers after the first dot left out."""
    return _INSTRUCTION.findall(sass)


def count_instructions(sass: str) -> Counter[str]:
    """How often each opcode occurs in SASS text."""
    return Counter(opcodes(sass))


def _run(tool: str, *arguments: str) -> str:
    path = find_tool(tool)
    if path is None:
        raise RuntimeError(f"{tool} is not installed: put it on the PATH, or `pip install nvidia-cuda-{tool}`")
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{path} {' '.join(arguments)} failed with exit code {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout
