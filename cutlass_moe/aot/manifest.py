"""The manifest of a kernel library: what is in it, what it was built from, and which versions can load it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cutlass_moe.aot.locations import MANIFEST_NAME
from cutlass_moe.aot.sass import Resources
from cutlass_moe.version import VERSION

SCHEMA_VERSION = 4  # changes with the manifest's form, and with what a library's functions take
ARCH = "sm_90a"
CUDA_MAJOR = 13  # of the CUDA runtime that the library links to
REBUILD = "build it with `python -m cutlass_moe build` where nvidia-cutlass-dsl is installed (no GPU needed)"


class LibraryError(RuntimeError):
    """A kernel library that cannot be used. The message says why, and how to build a good one."""


@dataclass(frozen=True)
class KernelEntry:
    """One kernel of a library.

    Attributes:
        name: the exported function, `KernelSpec.name`.
        spec: `KernelSpec.describe()`.
        source_hash: key of everything that the kernel was compiled from (`build.source_hash`).
        cubin_sha256: of the GPU code, which lies in the library byte for byte (`sass.embedded_cubin`).
        resources: what the compiled code uses; None when it was built without the disassemblers.
    """

    name: str
    spec: dict[str, Any]
    source_hash: str
    cubin_sha256: str
    resources: Resources | None


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    Attributes:
        schema: version of this format.
        cutlass_moe: version of this package that built it: how kernels are called may change between two.
        arch: GPU architecture of the kernels.
        dsl: version of nvidia-cutlass-dsl that compiled them.
        c_compiler: what the C compiler that linked them says it is.
        tvm_ffi: major.minor version of tvm_ffi, whose binary interface the library was linked to.
        cuda: major version of the CUDA runtime it was linked to.
        library: file name of the shared library, in the manifest's directory.
        library_sha256: of that file.
        kernels: its kernels by name.
    """

    schema: int
    cutlass_moe: str
    arch: str
    dsl: str
    c_compiler: str
    tvm_ffi: str
    cuda: int
    library: str
    library_sha256: str
    kernels: dict[str, KernelEntry]

    def to_json(self) -> str:
        content = asdict(self)
        content["kernels"] = [asdict(self.kernels[name]) for name in sorted(self.kernels)]
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parses a manifest of this schema. Raises ValueError that says what is missing or different."""
        content = json.loads(text)
        if not isinstance(content, dict) or "schema" not in content:
            raise ValueError("it has no schema version")
        if content["schema"] != SCHEMA_VERSION:
            raise ValueError(f"its schema is {content['schema']}, and this version reads schema {SCHEMA_VERSION}")
        missing = [field.name for field in fields(cls) if field.name not in content]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        try:
            entries = [_entry(kernel) for kernel in content["kernels"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"a kernel's entry is malformed ({error})") from error
        values = {field.name: content[field.name] for field in fields(cls)}
        return cls(**{**values, "kernels": {entry.name: entry for entry in entries}})

    def write(self, directory: Path) -> None:
        """Puts `manifest.json` into the directory in one step: a reader sees the old one or the new one."""
        write_atomically(directory / MANIFEST_NAME, self.to_json().encode())


def _entry(kernel: dict[str, Any]) -> KernelEntry:
    resources = kernel["resources"]
    return KernelEntry(
        name=kernel["name"],
        spec=kernel["spec"],
        source_hash=kernel["source_hash"],
        cubin_sha256=kernel["cubin_sha256"],
        resources=None if resources is None else Resources(**resources),
    )


def json_form(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec's description as it reads back from a manifest (tuples become lists)."""
    form: dict[str, Any] = json.loads(json.dumps(spec))
    return form


def tvm_ffi_interface(version: str) -> str:
    """The part of a tvm_ffi version that binary compatibility depends on: 0.1.15 -> 0.1."""
    return ".".join(version.split(".")[:2])


def file_sha256(path: Path) -> str:
    return bytes_sha256(path.read_bytes())


def bytes_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file through a temporary one beside it, so that nobody sees half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_manifest(directory: Path) -> Manifest:
    """Reads a library's manifest. Raises LibraryError when it is missing, unreadable or of another schema."""
    path = directory / MANIFEST_NAME
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LibraryError(f"no kernel library in {directory} (it has no {MANIFEST_NAME}): {REBUILD}") from None
    except (ValueError, OSError) as error:
        raise LibraryError(f"kernel library manifest {path} cannot be read, {error}: {REBUILD}") from error


def check_library(directory: Path, manifest: Manifest, tvm_ffi_version: str) -> Path:
    """The manifest's shared library. Raises LibraryError when it is not one that this process can load."""
    path = directory / manifest.library
    problem = None
    if manifest.cutlass_moe != VERSION:
        problem = f"was built by cutlass_moe {manifest.cutlass_moe}, and this is {VERSION}"
    elif manifest.arch != ARCH:
        problem = f"is for {manifest.arch}, and this version needs {ARCH}"
    elif manifest.cuda != CUDA_MAJOR:
        problem = f"is for CUDA {manifest.cuda}, and this version needs CUDA {CUDA_MAJOR}"
    elif manifest.tvm_ffi != tvm_ffi_interface(tvm_ffi_version):
        problem = f"was linked to tvm_ffi {manifest.tvm_ffi}, and tvm_ffi {tvm_ffi_version} is installed"
    elif not path.exists():
        problem = "is missing, though its manifest is there"
    elif file_sha256(path) != manifest.library_sha256:
        problem = "is damaged, or not the one that its manifest describes"
    if problem:
        raise LibraryError(f"kernel library {path} {problem}: {REBUILD}")
    return path
