"""A new module, with a data file beside it."""

import json
from pathlib import Path

LIMITS = json.loads(Path(__file__).with_name("limits.json").read_text(encoding="utf-8"))


def takes(rows):
    return LIMITS["min_rows"] <= rows <= LIMITS["max_rows"]
