"""What a person reads: a row a digest, a usage that says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy import report
from deploy.agent.plan import Plan
from deploy.bundle import Bundle
from deploy.gates import in_order
from deploy.layout import HERE
from deploy.lock import Lock


def test_every_digest_of_a_lock_has_a_row_of_its_own() -> None:
    expect = {"plan": "a" * 64, "image": {"layer": "sha256:b", "config": "sha256:c"}}
    lines = report.lock_text(Lock(inputs={}, expect=expect), changed=True).splitlines()

    rows = [line.rsplit(None, 1) for line in lines[1:]]
    assert [(name.strip(), value) for name, value in rows] == [
        ("image config", "sha256:c"),
        ("image layer", "sha256:b"),
        ("plan", "a" * 64),
    ]


@pytest.mark.parametrize("given", [(), ("--base", "a.md"), ("--candidate", "b.md")])
def test_accuracy_with_fewer_than_two_sides_is_not_compared(given: tuple[str, ...]) -> None:
    argv = [sys.executable, "-m", "invoke", "--search-root", str(HERE.top), "bench.accuracy"]
    done = subprocess.run([*argv, *given], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "nothing to compare" in done.stderr
    assert "fix: give both" in done.stderr


def test_what_to_type_with_a_bundle_names_it_and_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "mine-123456789abc.pyz").write_bytes(b"1234")
    plan = Plan(
        name="mine", package="pack", site="/site", python="/usr/bin/python3",
        requires={}, env_script="", launch_dir="", files=(),
    )  # fmt: skip
    made = Bundle(
        path=tmp_path / "mine-123456789abc.pyz", sha256="s", plan=plan, inputs={}, agent="a"
    )

    text = report.bundle_text(made, "/usr/bin/python3")

    for verb, kept in (("check ", "check"), ("deploy", "deploy"), ("verify", "evidence")):
        typed = f"  /usr/bin/python3 -I -S mine-123456789abc.pyz {verb} --root / > {kept}.json"
        assert typed in text.splitlines()
    assert "  ./inv verify -n mine --evidence evidence.json" in text


def test_a_reason_that_several_gates_share_is_told_once() -> None:
    gates = in_order([], {3: "no kernel"}, "no service was started")
    lines = report.gates_text(gates).splitlines()[:7]

    assert [line.rpartition("  ")[2] for line in lines] == [
        "(no service was started)",
        "(as above)",
        "(no kernel)",
        "(no service was started)",
        "(as above)",
        "(as above)",
        "(as above)",
    ]
