"""What pyproject.toml cannot say: wheels hold compiled kernels, for one platform and for every Python."""

import json
import platform
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

LIBRARY = Path(__file__).resolve().parent / "cutlass_moe" / "lib"
# PyTorch's own wheels ask for glibc 2.28, so this asks for no more. tests/test_wheel.py checks what the library needs.
PLATFORM = f"manylinux_2_28_{platform.machine()}"


class KernelWheel(bdist_wheel):
    """Refuses to pack a wheel without kernels: it would compile on first use, where there may be no compiler."""

    def run(self) -> None:
        manifest = LIBRARY / "manifest.json"
        if not manifest.exists() or not (LIBRARY / json.loads(manifest.read_text())["library"]).exists():
            raise SystemExit(
                "The wheel is to hold compiled kernels and there are none: run `make kernels` (or `python -m "
                "cutlass_moe build` where the extra `build` is installed), then pack it again."
            )
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM


class KernelDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # so that it installs where platform-specific packages go


setup(distclass=KernelDistribution, cmdclass={"bdist_wheel": KernelWheel})
