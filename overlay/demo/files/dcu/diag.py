"""The dispatch marker: one line on stderr for every call of a watched operator.

Off unless VLLM_DCU_KERNEL_DIAG is 1 when this module is imported. The line reads

    DCU_KERNEL_DIAG selected=True shape=(1, 2048, 4096) dtype=torch.bfloat16 op=LLMM1 pid=71

with the shape as (rows of the input, its columns, rows of the weight); the first is the number of
tokens. `selected` is True where candidates.json says that the candidate takes this many.
"""

import json
import os
import sys
from pathlib import Path

ENABLED = os.environ.get("VLLM_DCU_KERNEL_DIAG", "0") == "1"
CANDIDATES = json.loads(Path(__file__).with_name("candidates.json").read_text(encoding="utf-8"))


def selected(op, rows):
    """Say whether the candidate of `op` takes an input of so many rows."""
    rule = CANDIDATES.get(op, {"min_rows": 1, "max_rows": 0})
    return rule["min_rows"] <= rows <= rule["max_rows"]


def report(op, x, weight):
    """Print the marker for one call; `x` and `weight` need `.shape`, and `x` needs `.dtype`."""
    if not ENABLED:
        return
    columns = x.shape[-1]
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    # One write of one line: several processes share this stream.
    sys.stderr.write(
        f"DCU_KERNEL_DIAG selected={selected(op, rows)} "
        f"shape=({rows}, {columns}, {weight.shape[0]}) dtype={x.dtype} op={op} pid={os.getpid()}\n"
    )
    sys.stderr.flush()
