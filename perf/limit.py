"""A limit on how long a call may take."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class OutOfTime(BaseException):
    """The limit was reached. Not an Exception, so that what is limited does not take it for an error of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside the `with` when it is not left in time.

    An alarm does it, in the main thread: it ends Python code, and waiting for a compiler or a sleep. A native call is
    ended only once it returns, so one that hangs is not.
    """

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
