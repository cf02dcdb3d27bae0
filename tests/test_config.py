"""Configurations: their names, which can be built, which one a shape gets, and which kernels ship for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cutlass_moe import heuristics
from cutlass_moe.aot.catalogue import catalogue
from cutlass_moe.aot.specs import gemm_specs
from cutlass_moe.config import GemmConfig, GemmSpec, why_not_implementable
from cutlass_moe.heuristics import choose_gemm_config, configs_of, look_up
from epilogues import Identity, RoutingScale, SiluGate

PLAIN, WIDE, GATHER, WIDE_GATHER = "128x16_32_c2", "128x64_96_c2_pp", "128x16_32_c2_g", "128x64_96_c2_pp_g"
ENTRIES: list[dict[str, Any]] = [
    {
        "accumulators": 2,
        "features": 2048,
        "reduction": 4096,
        "choices": [[48, PLAIN], [None, WIDE]],
        "gather": [[16, GATHER], [80, WIDE_GATHER]],
    },
    {"accumulators": 2, "features": 49152, "reduction": 8192, "choices": [[None, WIDE]]},
    {"accumulators": 1, "features": 4096, "reduction": 1024, "choices": [[None, PLAIN]]},
]


@pytest.mark.parametrize(("ping_pong", "gather"), list(product((False, True), repeat=2)))
def test_names_are_read_back(ping_pong: bool, gather: bool) -> None:
    config = GemmConfig(128, (16, 32, 96), 2, ping_pong, gather)
    assert config.name == "128x16_32_96_c2" + ("_pp" if ping_pong else "") + ("_g" if gather else "")
    assert GemmConfig.from_name(config.name) == config


@pytest.mark.parametrize("name", ["", "128x16", "128x16_c2_g_pp", "128x16_c2_g_g", "128x16_c2g", "128x16_c2_G"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="is no GEMM configuration"):
        GemmConfig.from_name(name)


@pytest.mark.parametrize(("cluster", "most"), [(1, 96), (2, 224)])
def test_widest_tile_that_gathers(cluster: int, most: int) -> None:
    """A lane keeps one row number: 32 for each producer warp of the cluster but the one that draws tiles."""
    widest = GemmConfig(128, (most,), cluster, gather=True)
    wider = replace(widest, token_widths=(most + 16,))
    assert why_not_implementable(widest, SiluGate()) is None
    reason = f"gather in a cluster of {cluster} takes tiles of at most {most} tokens, got {most + 16}"
    assert why_not_implementable(wider, SiluGate()) == reason
    assert why_not_implementable(replace(wider, gather=False), SiluGate()) is None


def test_a_stage_holds_the_rows_that_are_gathered() -> None:
    """Eight rows at a time; without gather whole boxes, here of 32."""
    config = GemmConfig(128, (64, 112), 2)
    assert (config.token_box, config.stage_tokens) == (32, 128)
    gathers = replace(config, gather=True)
    assert (gathers.token_box, gathers.stage_tokens) == (8, 112)


def in_table(rows_per_expert: float, gather: bool, features: int = 2048, accumulators: int = 2) -> str:
    return look_up(ENTRIES, accumulators, features, 4096, rows_per_expert, gather)


def test_gather_comes_first_up_to_its_limit() -> None:
    assert [in_table(rows, True) for rows in (0.1, 16, 16.1, 80)] == [GATHER, GATHER, WIDE_GATHER, WIDE_GATHER]
    assert in_table(80.1, True) == in_table(1e6, True) == WIDE, "beyond, the choice without"
    assert [in_table(rows, False) for rows in (0.1, 48, 48.1)] == [PLAIN, PLAIN, WIDE]


def test_gather_without_a_limit() -> None:
    (entry, *_) = ENTRIES
    always = [{**entry, "gather": [[None, GATHER]]}]
    assert look_up(always, 2, 2048, 4096, 1e6, True) == GATHER and look_up(always, 2, 2048, 4096, 1e6, False) == WIDE


def test_gather_is_of_the_nearest_shape() -> None:
    """Whose entry may have none, although another's does."""
    assert in_table(1, True, features=2050) == GATHER
    assert in_table(1, True, features=49000) == WIDE
    assert in_table(1, True, accumulators=1) == PLAIN


def test_choice_by_rows_for_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristics, "_ENTRIES", ENTRIES)
    assert choose_gemm_config(16 * 8, 8, 2048, 4096, 2, True) == GemmConfig.from_name(GATHER)
    assert choose_gemm_config(17 * 8, 8, 2048, 4096, 2, True) == GemmConfig.from_name(WIDE_GATHER)
    assert choose_gemm_config(17 * 8, 8, 2048, 4096, 2, False) == GemmConfig.from_name(PLAIN)


def test_kernels_that_gather_ship_for_two_accumulators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner finds none for one accumulator: the rows of GEMM 2 are grouped already."""
    monkeypatch.setattr(heuristics, "_ENTRIES", ENTRIES)
    assert [config.name for config in configs_of(2)] == [PLAIN, GATHER, WIDE, WIDE_GATHER], "the narrowest first"
    assert [config.name for config in configs_of(1)] == [PLAIN]
    assert {spec.config.name for spec in gemm_specs(SiluGate(), ["bfloat16"])} == {PLAIN, GATHER, WIDE, WIDE_GATHER}
    for epilogue in (Identity(), RoutingScale()):
        assert [spec.config.name for spec in gemm_specs(epilogue, ["bfloat16"])] == [PLAIN]
    gemms = [spec for spec in catalogue() if isinstance(spec, GemmSpec)]
    gathering = {spec.epilogue.accumulators for spec in gemms if spec.config.gather}
    assert gathering == {2} and len({spec.name for spec in gemms}) == len(gemms)


def test_what_ships_can_be_built() -> None:
    for spec in catalogue():
        if isinstance(spec, GemmSpec):
            assert why_not_implementable(spec.config, spec.epilogue) is None, spec.name
            assert spec.epilogue.accumulators == 2 or not spec.config.gather, spec.name
    for accumulators, epilogue in ((1, RoutingScale()), (2, SiluGate())):
        for config in configs_of(accumulators):
            assert why_not_implementable(config, epilogue) is None, (
                config.name
            )  # or a call could ask for what is not there
