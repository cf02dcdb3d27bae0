"""Stock CUTLASS C++: its SM90 grouped GEMM from the headers that nvidia-cutlass ships, built with nvcc.

`python -m perf.bundle --cutlass-peer` builds it ahead, for a machine that lacks nvcc or the headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from perf import PerfError
from perf.peers.base import Call, Finish, GemmsPeer, Prepared, Rows, silu_gate
from perf.workloads import Inputs

LIBRARY_VARIABLE = "CUTLASS_MOE_PEER_LIBRARY"
CACHE = Path.home() / ".cache" / "cutlass_moe" / "peers"
SOURCE = Path(__file__).with_name("cutlass_grouped_gemm.cu")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "-shared",
    "-Xcompiler=-fPIC",
)


def headers() -> Path | None:
    """The CUTLASS C++ headers of an installed nvidia-cutlass."""
    spec = importlib.util.find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        include = Path(folder) / "source" / "include"
        if (include / "cutlass" / "cutlass.h").exists():
            return include
    return None


def why_not_buildable() -> str | None:
    if shutil.which("nvcc") is None:
        return "there is no nvcc to build it"
    return None if headers() else "nvidia-cutlass, whose C++ headers it is built from, is not installed"


def build(folder: Path) -> Path:
    """Builds the library in `folder` unless it is there, and returns its path; takes about a minute.

    Raises:
        PerfError: nvcc or the headers are missing, or nvcc fails.
    """
    if reason := why_not_buildable():
        raise PerfError(f"the CUTLASS peer can't be built: {reason}")
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    library = folder / f"cutlass_grouped_gemm-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = library.with_suffix(f".{os.getpid()}")
        command = ["nvcc", *FLAGS, f"-I{headers()}", "-o", str(temporary), str(SOURCE)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            raise PerfError(f"nvcc can't build the CUTLASS peer: {' '.join(finished.stderr.split())[:300]}")
        os.replace(temporary, library)
    return library


class CutlassCppGemms(GemmsPeer):
    name = "cutlass_cpp"
    what = (
        "two GEMMs with silu * up by torch between them: CUTLASS C++ grouped GEMM (pointer arrays, 128x256x64,"
        " cluster 2x1, cooperative) on rows grouped before; no routing, no combine; gate-up weight fused before"
    )

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._library: Any = ctypes.CDLL(str(self._library_path()))
        self._library.cutlass_grouped_gemm_workspace.restype = ctypes.c_size_t

    @classmethod
    def absent(cls) -> str | None:
        return None if os.environ.get(LIBRARY_VARIABLE) else why_not_buildable()

    @staticmethod
    def _library_path() -> Path:
        given = os.environ.get(LIBRARY_VARIABLE)
        return Path(given) if given else build(CACHE)

    def bind(self, inputs: Inputs) -> tuple[Call, Finish]:
        rows = Rows(inputs, self.prepared)
        x_MH = inputs.x_TH[rows.token_M]
        gate_up_EJH, down_EHI = self.prepared.gate_up_EJH, self.prepared.weights.down_EHI
        gate_up_MJ = x_MH.new_empty(len(x_MH), gate_up_EJH.shape[1])
        h_MI = x_MH.new_empty(len(x_MH), down_EHI.shape[2])
        y_MH = torch.empty_like(x_MH)
        first = GroupedGemm(self._library, x_MH, gate_up_EJH, gate_up_MJ, rows)
        second = GroupedGemm(self._library, h_MI, down_EHI, y_MH, rows)

        def call() -> torch.Tensor:
            first()
            h_MI.copy_(silu_gate(gate_up_MJ))
            second()
            return y_MH

        return call, rows.combine


class GroupedGemm:
    """`out[r] = a[r] @ weights[e].T` for the rows r of each expert e; its tables are made once."""

    def __init__(
        self, library: Any, a_MK: torch.Tensor, weights_ENK: torch.Tensor, out_MN: torch.Tensor, rows: Rows
    ) -> None:
        experts, features, reduction = weights_ENK.shape
        starts = rows.offsets_E1.tolist()
        device = a_MK.device

        def table(values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def addresses(tensor: torch.Tensor, at: list[int], stride: int) -> torch.Tensor:
            return table([tensor.data_ptr() + place * stride * tensor.element_size() for place in at])

        shapes = [(end - start, features, reduction) for start, end in pairwise(starts)]
        self._tables = (
            table(shapes, torch.int32),
            addresses(a_MK, starts[:-1], a_MK.stride(0)),
            table([a_MK.stride(0)] * experts),
            addresses(weights_ENK, list(range(experts)), weights_ENK.stride(0)),
            table([weights_ENK.stride(1)] * experts),
            addresses(out_MN, starts[:-1], out_MN.stride(0)),
            table([out_MN.stride(0)] * experts),
        )
        self._tensors = (a_MK, weights_ENK, out_MN)  # kept alive: the tables have only their addresses
        self._experts = experts
        self._sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        workspace_bytes = library.cutlass_grouped_gemm_workspace(experts, self._sm_count)
        self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self._run = library.cutlass_grouped_gemm_run

    def __call__(self) -> None:
        status = self._run(
            ctypes.c_int(self._experts),
            *(ctypes.c_void_p(table.data_ptr()) for table in self._tables),
            ctypes.c_int(self._sm_count),
            ctypes.c_void_p(self._workspace.data_ptr()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if status:
            raise RuntimeError(f"CUTLASS refuses the grouped GEMM: status {status}")
