"""Whole files or none: written beside their place, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A name to write to, which takes the place of `path` at the end, or is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
