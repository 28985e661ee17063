"""Summing up a profile of a million kernels, against reading it with csv alone.

Processor time is compared: both sides are one process that waits for nothing.
"""

from __future__ import annotations

import csv
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from deploy.layout import HERE

_ROWS = 1_000_000
_ROUNDS = 3
_CLASSES = {
    "gemm": ["Cijk_*", "Custom_Cijk_*", "LLGemm1_kernel*"],
    "attention": ["kernel_unified_attention_*"],
    "linear-attention": ["chunk_gated_delta_rule*", "fused_recurrent_gated_delta_rule*"],
    "elementwise": ["void at::native::*", "triton_poi_fused_*"],
}
_STARTS = ("Cijk_Alik_Bljk_BBH_MT96x48x32_", "kernel_unified_attention_2d_", "triton_poi_fused_",
           "void at::native::vectorized_elementwise_kernel<4, at::native::Functor<float>, ",
           "chunk_gated_delta_rule_fwd_", "rare::kernel<int, ")  # fmt: skip

_OURS = """
import json, resource, sys, time
from pathlib import Path
from deploy.measure.profile import summary
classes = json.loads(sys.argv[2])
begun = time.process_time()
found = summary(Path(sys.argv[1]), classes)
took = time.process_time() - begun
print(took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, found.kernels)
"""
_RIVAL = """
import csv, sys, time
begun = time.process_time()
with open(sys.argv[1], newline="") as file:
    count = sum(1 for _ in csv.reader(file))
print(time.process_time() - begun, 0, count)
"""


_REPORT = """
import json, time
from deploy import page
from deploy.measure import record
from deploy.measure.compare import compare
state = {"pid": 1, "start_ticks": 1, "boot_id": "b", "members": [1], "faults": []}
counters = {"vllm:prefix_cache_queries": 0.0, "vllm:prefix_cache_hits": 0.0}
def run(begun, factor):
    buckets = []
    rate = 9.0 * factor
    for name in ("4-8K", "8-16K", "16-32K"):
        result = {"num_prompts": 50, "completed": 50, "failed": 0, "duration": 50000 / rate,
                  "output_throughput": rate, "input_lens": [9000] * 50, "output_lens": [1000] * 50,
                  "start_times": [(50000 / rate - 75) / 49 * i for i in range(50)],
                  "ttfts": [4.0 + 0.01 * i for i in range(50)], "errors": [""] * 50,
                  "itls": [[0.07] * 1000] * 50}
        markers = [{"pid": 1, "shape": [i, 5120], "dtype": "bfloat16", "selected": True,
                    "before": 1, "after": 1, "window": 1} for i in range(333)]
        scan = {"markers": markers, "pids": [1], "signs": [], "lost": [], "ready": True}
        rounds = [{"round": r, "exit": 0, "begun": begun + n, "stale": [], "result": result,
                   "before": state, "after": state, "compiled": 0, "compiling": [],
                   "counters": {"before": counters, "after": counters}, "markers": scan}
                  for n, r in enumerate(("warm", "counted"))]
        buckets.append({"bucket": name, "sha256": "a", "requests": 50, "argv": [],
                        "rounds": rounds})
    locked = {b["bucket"]: {"sha256": "a", "requests": 50} for b in buckets}
    raw = {"schema": "bench/1", "flags": [], "buckets": buckets, "started": begun,
           "locked": {"buckets": locked}, "gates": []}
    return json.dumps(raw)
texts = run(1.0, 1.0), run(100.0, 1.05)
paths = [{"path": f"vllm/{i}.py", "class": "overlay", "act": "modify", "reason": "vllm/**"}
         for i in range(2000)]
files = [{"path": p["path"], "state": "ok"} for p in paths]
evidence = {"source": {"paths": paths}, "files": files}
begun = time.process_time()
one, two = (record.parse(json.loads(text)) for text in texts)
found = page.document(name="x", identities={}, evidence=evidence, environment=[], run=two,
                      comparison=compare([one], [two]))
text = json.dumps(found) + page.markdown(found) + page.html(found)
print(time.process_time() - begun)
"""


def main() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=HERE.out) as name:
        path = Path(name, "million.hipkernel.csv")
        _write(path)
        pairs = [(_run(_OURS, path), _run(_RIVAL, path)) for _ in range(_ROUNDS)]
    ours = statistics.median(ours[0] for ours, _ in pairs)
    rival = statistics.median(rival[0] for _, rival in pairs)
    memory = max(ours[1] for ours, _ in pairs) / 1024
    rows = [
        {"what": "profile.summary of 1,000,000 rows, rival: csv alone", "ours": ours,
         "rival": rival, "ratio": ours / rival, "limit": 2.0},
        {"what": "profile.summary: peak memory in MB, rival: the allowed 100", "ours": memory,
         "rival": 100.0, "ratio": memory / 100, "limit": 1.0},
        _report(),
    ]  # fmt: skip
    for row in rows:
        figures = f"{row['ours']:.3g} against {row['rival']:.3g}, ratio {row['ratio']:.2f}"
        print(f"{row['what']}: {figures} (limit {row['limit']})")
    return rows


def _report() -> dict[str, Any]:
    """All three forms of a full run: 3 buckets of 50 requests, 1,000 markers, 2,000 paths."""
    times = [float(_call(_REPORT)) for _ in range(_ROUNDS)]
    took = statistics.median(times)
    what = "report of a full run, processor time, rival: the allowed second"
    return {"what": what, "ours": took, "rival": 1.0, "ratio": took, "limit": 1.0}


def _call(code: str) -> str:
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=HERE.top, capture_output=True, check=True, timeout=300)
    return done.stdout.decode()


def _write(path: Path) -> None:
    """A table as the profiler writes it: quoted, descending, with its Total row."""
    generator = random.Random(0)
    times = sorted((generator.randrange(1000, 10_000_000) for _ in range(_ROWS)), reverse=True)
    total = sum(times)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage"])
        calls = 0
        for number, took in enumerate(times):
            count = number % 9 + 1
            calls += count
            name = f"{_STARTS[number % len(_STARTS)]}{'unsigned int, ' * 8}{number}>"
            share = f"{100 * took / total:.3f}".rstrip("0")
            share += "0" * share.endswith(".")
            writer.writerow([name, count, took, took // count, share])
        writer.writerow(["Total", calls, total, total // calls, "100.0"])


def _run(code: str, path: Path) -> tuple[float, float, int]:
    """One side in a process of its own, so that memory and caches are its own."""
    import json

    argv = [sys.executable, "-c", code, str(path), json.dumps(_CLASSES)]
    done = subprocess.run(argv, cwd=HERE.top, capture_output=True, check=True, timeout=300)
    took, memory, count = done.stdout.split()
    return float(took), float(memory), int(count)


if __name__ == "__main__":
    print(main(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
