"""Every kernel of the libraries at hand against the reference, as `cutlass-moe verify` runs them."""

from __future__ import annotations

import pytest

from cutlass_moe.aot.load import KernelLibrary
from cutlass_moe.aot.locations import find_libraries
from cutlass_moe.aot.verify import verify


def test_every_kernel_agrees_with_the_reference() -> None:
    directories = find_libraries()
    if not directories:
        pytest.skip("no kernel library here: the other tests compile what they need")
    for directory in directories:
        verdicts = list(verify(KernelLibrary(directory)))
        assert verdicts and not {verdict.name: verdict.problem for verdict in verdicts if verdict.problem}
