"""Files of measurements: JSON with a schema's name, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from perf import PerfError

T = TypeVar("T")


def save(document: dict[str, Any], path: Path) -> None:
    """Writes the file: one that dies meanwhile leaves the last full state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def load(path: Path, schema: str, what: str, build: Callable[[dict[str, Any]], T]) -> T:
    """Reads a file and makes of its document what `build` does.

    Args:
        what: names what the file should be in errors, with its article.

    Raises:
        PerfError: not readable, not JSON, of another schema, or a field is missing or unknown.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise PerfError(f"{path} cannot be read as {what}: {error}") from error
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise PerfError(f"{path} is not {what} of this version: its schema is {found!r}, expected {schema!r}")
    try:
        return build(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise PerfError(f"{path} says schema {schema!r} but does not follow it: {error}") from error
