"""What an operator can ask for: `./inv --list`."""

from __future__ import annotations

from invoke import Collection

namespace = Collection()
