"""The package's version: a kernel library is used only by the version that built it."""

VERSION = "0.1.0"
