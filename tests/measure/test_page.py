"""The report: what it says of a run, of nothing, and of hostile texts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from deploy import page
from deploy.gates import NAMES
from deploy.measure import record
from deploy.measure.compare import compare
from deploy.measure.profile import summary
from tests.measure.test_bench_compare import raw_result

FIXTURES = Path(__file__).parent / "fixtures"
CLASSES = {"gemm": ("Cijk_*",), "attention": ("kernel_unified_attention_*",)}


def gates(until: int = 8) -> list[dict[str, Any]]:
    return [
        {"gate": n, "name": name, "verdict": "passed" if n < until else "not reached",
         "reason": "" if n < until else "no baseline", "proofs": [f"proof {n}"], "faults": []}
        for n, name in NAMES.items()
    ]  # fmt: skip


def run(speed: float = 1.0, begun: float = 1000.0) -> record.Run:
    result = raw_result(speed)
    state = {"pid": 4187, "start_ticks": 9, "boot_id": "b", "members": [4187, 4190], "faults": [],
             "listeners": [{"address": "0.0.0.0", "port": 8001}],
             "mapped": [{"path": "vllm/_rocm_C.abi3.so", "state": "ok", "inode": 7}]}  # fmt: skip
    counters = {"vllm:prefix_cache_queries": 0.0, "vllm:prefix_cache_hits": 0.0}
    marker = {"pid": 4190, "shape": [4096, 5120], "dtype": "bfloat16", "selected": True,
              "before": 0, "after": 5, "window": 5}  # fmt: skip
    rounds = [
        {"round": name, "exit": 0, "begun": begun + n, "stale": [], "before": state,
         "after": state, "counters": {"before": counters, "after": counters}, "result": result,
         "markers": {"markers": [marker], "pids": [4187, 4190]}, "compiled": 0, "compiling": []}
        for n, name in enumerate(("warm", "counted"))
    ]  # fmt: skip
    bucket = {"bucket": "8-16K", "sha256": "a" * 64, "requests": 5, "argv": [], "rounds": rounds}
    locked = {"8-16K": {"dataset": "/d", "sha256": "a" * 64, "requests": 5}}
    return record.parse({
        "schema": "bench/1", "flags": ["--disable-shuffle"], "started": begun,
        "locked": {"buckets": locked, "flags": ["--disable-shuffle"]}, "cleared": ["http_proxy"],
        "versions": {"vllm": "0.18.1"}, "buckets": [bucket], "gates": gates(), "target": "ssh:a",
    })  # fmt: skip


def full() -> dict[str, Any]:
    base = [run(s, t) for s, t in ((1.0, 1000.0), (1.001, 4000.0), (0.999, 5000.0))]
    ours = [run(s, t) for s, t in ((1.06, 2000.0), (1.061, 3000.0), (1.059, 6000.0))]
    profile = summary(FIXTURES / "hipkernel.csv", CLASSES)
    source = {
        "paths": [
            {"path": "vllm/envs.py", "class": "overlay", "act": "modify", "reason": "vllm/**"}
        ]
    }
    return page.document(
        name="qwen", identities={"head": "1" * 40, "inputs": "2" * 64, "plan": "3" * 64,
                                 "bundle": "4" * 64},
        evidence={"tree": "5" * 64, "files": [{"path": "vllm/envs.py", "state": "ok"}],
                  "source": source, "gates": gates(5), "target": "local:/x"},
        environment=[{"name": "VLLM_DCU", "value": "1", "why": "turns it on"}], gates=gates(),
        run=ours[-1], comparison=compare(base, ours, 0.9775), profile=profile, before=profile,
    )  # fmt: skip


class Links(HTMLParser):
    """Everything a page would load from elsewhere, and whether its elements are closed."""

    VOID = ("meta", "line", "rect", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_shows_every_part_and_loads_nothing() -> None:
    text = page.html(full())

    found = Links()
    found.feed(text)
    assert found.open == []
    assert (found.loads, found.scripts) == ([], 0)
    assert "url(" not in text
    assert "@import" not in text
    for word in ("The seven gates", "gain", "0.9775", "VLLM_DCU", "turns it on", "vllm/envs.py",
                 "(4096, 5120)", "planned", "kernel time", "What this does not prove", "pid 4187",
                 "prefers-color-scheme: dark", "proof 7", "http_proxy"):  # fmt: skip
        assert word in text, word
    assert text.count("<svg") == 4


def test_the_same_evidence_gives_the_same_bytes() -> None:
    assert page.html(full()) == page.html(full())
    assert page.markdown(full()) == page.markdown(full())


def test_words_of_others_stay_words(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>|`x`"
    found = full()
    found["gates"][0]["proofs"] = [evil]
    found["environment"] = [{"name": "A", "value": evil, "why": evil}]
    found["name"] = evil

    text = page.html(found)

    parser = Links()
    parser.feed(text)
    assert parser.scripts == 0
    assert "&lt;script&gt;" in text
    table = page.markdown(found)
    assert "\\<script\\>" in table
    assert not re.search(r"(?<!\\)<script", table)


def test_nothing_looked_at_is_said_to_be_nothing() -> None:
    found = page.document(name="x", identities={}, evidence=None, environment=[])

    assert page.headline(found) == "Nothing was verified yet."
    text = page.html(found)
    assert "Nothing was verified yet." in text
    assert "where the time goes" in text
    assert '<h2 id="bench">' not in text
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("until", "said"),
    [(8, "what was measured is what was edited"), (7, "not reached from gate 7 on")],
)
def test_the_headline_says_how_far_the_proof_goes(until: int, said: str) -> None:
    evidence = {"gates": gates(until)}
    found = page.document(name="x", identities={}, evidence=evidence, environment=[])

    assert said in page.headline(found)


def test_the_headline_counts_one_gate_as_one() -> None:
    found = page.document(name="x", identities={}, evidence={"gates": gates(2)}, environment=[])

    assert page.headline(found) == "Gate 1 passed; not reached from gate 2 on."


def test_a_failed_gate_is_the_headline_and_stands_under_the_limits() -> None:
    rows = gates()
    rows[4].update(verdict="failed", faults=["a second server listens"])

    found = page.document(name="x", identities={}, evidence={"gates": rows}, environment=[])

    assert page.headline(found).startswith("Gate 5 failed")
    assert "gate 5 (process state clean): failed" in found["not_proven"]
    assert "a second server listens" in page.html(found)


def test_a_run_without_a_baseline_shows_its_figure_and_claims_nothing() -> None:
    found = page.document(
        name="x", identities={}, evidence={"gates": gates()}, environment=[], run=run()
    )

    text = page.html(found)
    assert "no gain and no loss follows from it" in text
    assert "no baseline was named" in text
    assert "that a kernel is faster (run a counted benchmark against a baseline)" in text


def test_the_table_has_the_figures_of_the_page() -> None:
    text = page.markdown(full())

    assert "| gate | proves | verdict | on what it rests |" in text
    assert "95 %" in text
    assert "| VLLM\\_DCU | 1 | turns it on |" in text
