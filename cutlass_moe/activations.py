"""What stands between the two projections of an expert: activations, by name or as epilogues, and biases."""

from __future__ import annotations

from functools import lru_cache

from epilogues import INPUT, Bias, ClampedSwiglu, Epilogue, GeluGate, RoutingScale, SiluGate, check_epilogue

# Squared ReLU is not among them: the models that use it have no gate. `ReluSquared` is for their `grouped_gemm`.
ACTIVATIONS: dict[str, Epilogue] = {
    "silu": SiluGate(),
    "gelu": GeluGate(),
    "gelu_tanh": GeluGate("tanh"),
    "clamped_swiglu": ClampedSwiglu(),
    "swiglu_oai": ClampedSwiglu(),
}
_given: dict[str, Epilogue] = {}  # epilogues that callers passed as objects: an operator's schema holds strings only


def activation_key(activation: str | Epilogue) -> str:
    """The activation as a string, from which `gate_epilogue` finds it again.

    Raises:
        ValueError: no activation has this name, or the epilogue does not turn a gate and an up value into one.
        TypeError: neither a name nor an epilogue.
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {sorted(ACTIVATIONS)} or an epilogues.Epilogue, got {activation!r}"
            )
        return activation
    if not isinstance(activation, Epilogue):
        raise TypeError(
            f"activation must be one of {sorted(ACTIVATIONS)} or an epilogues.Epilogue, got {type(activation).__name__}"
        )
    return _key_of(activation)


@lru_cache(maxsize=1024)
def _key_of(epilogue: Epilogue) -> str:
    check_epilogue(epilogue)
    extras = (epilogue.tensors, epilogue.scalars, epilogue.side_outputs, epilogue.scatter, epilogue.out_dtype != INPUT)
    if epilogue.accumulators != 2 or any(extras):
        raise ValueError(
            "activation must be an epilogue of a gate and an up value (accumulators = 2) that needs nothing else "
            f"(no tensors, scalars, side outputs, scatter or cast: biases are b_gate and b_up), got {epilogue!r}"
        )
    key = f"{epilogue.name}#{len(_given)}"
    _given[key] = epilogue
    return key


@lru_cache(maxsize=1024)
def gate_epilogue(key: str, biased: bool) -> Epilogue:
    """The ending of GEMM 1, from `activation_key`'s result; with `biased` it loads `gate_bias` and `up_bias`."""
    activation = _given.get(key) or ACTIVATIONS[key]
    return Bias(operands=2) | activation if biased else activation


@lru_cache(maxsize=2)
def down_epilogue(biased: bool) -> Epilogue:
    """The ending of GEMM 2; with `biased` it loads `bias`, which the routing weight scales, and then `row_weight`."""
    return Bias() | RoutingScale() if biased else RoutingScale()
