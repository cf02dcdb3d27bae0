"""Kernels compiled ahead of time: `build` makes a library, `load` takes kernels from it without the DSL."""
