"""An epilogue from its description, as kernel manifests hold it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from epilogues.base import Epilogue


def read_epilogue(description: Mapping[str, Any]) -> Epilogue:
    """The epilogue whose `describe()` this is. Imports its module.

    Raises ImportError or AttributeError when its class is not there, TypeError when it is no epilogue or takes other
    fields.
    """
    kind: Any = importlib.import_module(description["module"])
    for part in description["class"].split("."):
        kind = getattr(kind, part)
    if not (isinstance(kind, type) and issubclass(kind, Epilogue)):
        raise TypeError(f"{description['module']}.{description['class']} is not an epilogue any more")
    return kind.from_fields(description["fields"])
