"""Every catalogue kernel compiles for sm_90a, uses tensor cores and TMA as meant, and spills nothing."""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from cutlass_moe.aot.build import build
from cutlass_moe.aot.catalogue import catalogue
from cutlass_moe.aot.load import KernelLibrary
from cutlass_moe.aot.locations import default_output
from cutlass_moe.aot.sass import Resources, count_instructions, disassemble_embedded, find_tool, opcodes, parse_usage
from cutlass_moe.config import CombineSpec, GemmSpec, KernelSpec

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function kernel_count:
  REG:32 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:580 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function kernel_scan:
  REG:168 STACK:0 SHARED:0 LOCAL:8 CONSTANT[0]:612 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
.text.kernel_gemm:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0040*/              @UP1 UTMALDG.3D.MULTICAST [UR8], [UR4], UR6 ;
        /*0050*/         @!UPT UIADD3 URZ, URZ, URZ, URZ ;
.L_x_1:
        /*10060*/              @P2 STL [R1+0x8], R2 ;
        /*10070*/                  LDL.LU R2, [R1+0x8] ;
"""


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    """The catalogue's library where `python -m cutlass_moe build` puts it, brought up to date."""
    build(catalogue(), default_output())
    return KernelLibrary(default_output())


def resources(library: KernelLibrary, spec: KernelSpec) -> Resources:
    found = library.manifest.kernels[spec.name].resources
    assert found is not None, "cuobjdump and nvdisasm are needed: pip install -e .[test]"
    return found


@pytest.mark.parametrize("spec", catalogue(), ids=lambda spec: spec.name)
def test_kernel_keeps_to_registers(library: KernelLibrary, spec: KernelSpec) -> None:
    used = resources(library, spec)
    assert used.stack_bytes == 0
    assert used.local_bytes == 0
    assert (used.spill_loads, used.spill_stores) == (0, 0)
    assert 0 < used.registers <= 255


@pytest.mark.parametrize("spec", catalogue(), ids=lambda spec: spec.name)
def test_only_gemms_use_tensor_cores_and_bulk_loads(library: KernelLibrary, spec: KernelSpec) -> None:
    used = resources(library, spec)
    if isinstance(spec, GemmSpec):
        # Each width has code of its own, and a stage of 64 in the reduction takes 4 instructions of 16.
        assert used.hgmma >= 4 * len(spec.config.token_widths)
        assert used.bulk_loads >= 2  # weights and rows
    else:
        assert used.hgmma == 0


@pytest.mark.parametrize(
    "spec", [spec for spec in catalogue() if isinstance(spec, GemmSpec)], ids=lambda spec: spec.name
)
def test_matrix_instructions_overlap(library: KernelLibrary, spec: GemmSpec) -> None:
    """Where its control flow looks divergent to ptxas it puts a wait behind each."""
    used = resources(library, spec)
    assert used.hgmma_waits < used.hgmma


@pytest.mark.parametrize(
    "spec",
    [spec for spec in catalogue() if isinstance(spec, GemmSpec) and spec.config.gather],
    ids=lambda spec: spec.name,
)
def test_loads_of_gathered_rows_take_few_instructions(library: KernelLibrary, spec: GemmSpec) -> None:
    """At most 9 each, for a warp has little time. With addresses computed for each it is 17, and where the loader's
    loop looks divergent to the compiler, so that they are no longer uniform, 26: up to 8 and 42 % of a layer."""
    entry = library.manifest.kernels[spec.name]
    sass = disassemble_embedded(library.directory / library.manifest.library, entry.cubin_sha256)
    loads = [place for place, opcode in enumerate(opcodes(sass)) if opcode == "UTMALDG"]
    eight = [last - first for first, last in zip(loads, loads[8:], strict=False)]
    assert min(eight) <= 8 * 9


@pytest.mark.parametrize("spec", catalogue(), ids=lambda spec: spec.name)
def test_library_has_the_kernel(library: KernelLibrary, spec: KernelSpec) -> None:
    assert library.holds(spec)
    with pytest.raises(TypeError):
        library.function(spec)()  # too few arguments: the launcher checks them before it touches a GPU


def test_library_loads_in_milliseconds(library: KernelLibrary) -> None:
    """At most 50 ms for the library and 1 ms for a first kernel, at the best of a few tries."""
    spec = catalogue()[0]
    loads, kernels = [], []
    for _ in range(5):
        start = time.perf_counter()
        opened = KernelLibrary(library.directory)
        loaded = time.perf_counter()
        assert opened.holds(spec)
        opened.function(spec)
        kernels.append(time.perf_counter() - loaded)
        loads.append(loaded - start)
    assert min(loads) < 0.05 and min(kernels) < 0.001


def test_host_code_runs_on_any_cpu(library: KernelLibrary) -> None:
    """The DSL would compile launchers for the build machine's CPU: no AVX, which not every machine has."""
    path = library.directory / library.manifest.library
    code = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert "xmm" in code
    assert not re.search(r"%[yz]mm|%k[0-7]", code)


def test_cubin_is_found_in_the_library(library: KernelLibrary) -> None:
    spec = CombineSpec("bfloat16")
    path = library.directory / library.manifest.library
    sass = disassemble_embedded(path, library.manifest.kernels[spec.name].cubin_sha256)
    assert count_instructions(sass)["EXIT"] > 0
    with pytest.raises(RuntimeError, match="holds no cubin of SHA-256 00"):
        disassemble_embedded(path, "00")


def test_catalogue_names_are_unique() -> None:
    names = [spec.name for spec in catalogue()]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() for name in names)


def test_parse_usage() -> None:
    assert parse_usage(USAGE) == [(32, 16, 1024, 0), (168, 0, 0, 8)]
    assert parse_usage("no kernel here") == []


def test_count_instructions() -> None:
    counts = count_instructions(SASS)
    assert (counts["HGMMA"], counts["UTMALDG"], counts["STL"], counts["LDL"], counts["UIADD3"]) == (
        2,
        1,
        1,
        1,
        1,
    )
    assert sum(counts.values()) == 8


def test_find_tool() -> None:
    for name in ("cuobjdump", "nvdisasm"):
        path = find_tool(name)
        assert path is not None and path.exists()
    assert find_tool("no-such-tool") is None
