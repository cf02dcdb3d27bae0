"""Which GEMM configuration for which shape: looks it up in `gemm_table.json`, which `python -m perf tune` writes.

    {"schema": ..., "device": ..., "commit": ..., "date": ..., "entries": [
      {"accumulators": 2, "features": 49152, "reduction": 8192, "choices": [[16, "128x16_32_c2"], [null, "..."]],
       "gather": [[64, "128x16_32_c2_g"]]}, ...]}

An entry is one measured shape: `features` weight rows of an expert (gate and up together) and the reduction dimension.
A choice is the most rows an expert has on average, and a `GemmConfig.name`; the last of `choices` has no limit. Those
of `gather` gather their rows, and reach as far as that is faster than a permuted copy and the choice without. A shape
that was not measured takes the entry of the nearest one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutlass_moe.config import GemmConfig

TABLE = Path(__file__).with_name("gemm_table.json")

_ENTRIES: list[dict[str, Any]] = json.loads(TABLE.read_text())["entries"]


def configs_of(accumulators: int) -> tuple[GemmConfig, ...]:
    """Every configuration that the table names for an epilogue of so many accumulators, the narrowest first."""
    names = {
        name
        for entry in _ENTRIES
        if entry["accumulators"] == accumulators
        for _, name in (*entry["choices"], *entry.get("gather", ()))
    }
    return tuple(sorted(map(GemmConfig.from_name, names), key=lambda config: (config.tile_tokens, config.name)))


def choose_gemm_config(
    rows: int, experts: int, features: int, reduction: int, accumulators: int, gather: bool
) -> GemmConfig:
    """The configuration for `rows` rows spread over `experts` experts.

    Args:
        rows: M, the slots of all tokens; what each expert gets is known on the device only.
        experts: E.
        features: weight rows of one expert, gate and up together.
        reduction: K.
        accumulators: of the epilogue.
        gather: the rows lie anywhere. The configuration may gather them; where it does not, a copy is faster.
    """
    return GemmConfig.from_name(look_up(_ENTRIES, accumulators, features, reduction, rows / experts, gather))


def look_up(
    entries: Sequence[dict[str, Any]],
    accumulators: int,
    features: int,
    reduction: int,
    rows_per_expert: float,
    gather: bool,
) -> str:
    """The name that these entries give: of the shape's entry or of the nearest, by the logarithms of features and
    reduction, among those of as many accumulators."""

    def distance(entry: dict[str, Any]) -> tuple[bool, float]:
        apart = abs(math.log(entry["features"] / features)) + abs(math.log(entry["reduction"] / reduction))
        return entry["accumulators"] != accumulators, apart

    entry = min(entries, key=distance)
    choices = [*(entry.get("gather", ()) if gather else ()), *entry["choices"]]
    return str(next(name for most, name in choices if most is None or rows_per_expert <= most))
