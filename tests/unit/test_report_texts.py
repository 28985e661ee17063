"""What a person reads: a row a digest, a usage that says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deploy import report
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
