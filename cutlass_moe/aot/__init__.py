"""Kernels compiled ahead of time: `build` makes a library of the catalogue, `load` takes kernels from it without the DSL."""
