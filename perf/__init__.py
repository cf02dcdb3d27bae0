"""How fast the layer is, and how right: `python -m perf run`. Method: docs/performance.md."""


class PerfError(Exception):
    """A request that cannot be measured; the message is one sentence for the person who asked."""
