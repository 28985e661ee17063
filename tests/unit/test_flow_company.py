"""Calls that meet each other, users without a name, and callers without streams."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import flow
from deploy.layout import HERE, Layout

_REPRODUCE = """
import sys
from pathlib import Path
from deploy import flow
from deploy.layout import Layout
visit, _ = flow.reproduce("tiny", Layout(Path(sys.argv[1])))
sys.exit(visit.exit)
"""


@pytest.mark.slow
def test_reproduces_at_once_wait_for_each_other(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    (layout.top / "manifests").mkdir()
    shutil.copy(HERE.manifest("tiny"), layout.manifest("tiny"))
    shutil.copytree(HERE.series("tiny"), layout.series("tiny"))
    flow.lock("tiny", layout)
    argv = [sys.executable, "-c", _REPRODUCE, str(layout.top)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    calls = [subprocess.Popen(argv, cwd=HERE.top, **pipes) for _ in range(4)]
    said = [call.communicate(timeout=120)[1] for call in calls]
    assert [call.returncode for call in calls] == [0] * 4, said
    assert any("another reproduce is at work" in text for text in said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_user_without_a_name_is_told_by_number() -> None:
    code = "import os; os.setuid(54321); from deploy import flow; print(flow.operator())"
    env = {k: v for k, v in os.environ.items() if k not in ("USER", "LOGNAME", "LNAME", "USERNAME")}
    # What is imported is loaded before the user changes: the checkout may be closed to others.
    code = f"import deploy.flow; {code}"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(
        argv, env=env, cwd=HERE.top, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.startswith("uid 54321@"), done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_inv_opens_the_streams_that_its_caller_closed(tmp_path: Path, closed: str) -> None:
    """An agent that is started without one would write its evidence into what took its number."""
    shutil.copy(HERE.top / "inv", tmp_path / "inv")
    (tmp_path / "requirements.lock").write_text("")
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "stamp.lock").write_text("")
    python = venv / "bin/python"
    python.write_text(
        "#!/bin/sh\nfor n in 0 1 2; do [ -e /proc/$$/fd/$n ] || echo closed; done 9>&- >"
        f"'{tmp_path}/found'\n"
    )
    python.chmod(0o755)
    (venv / "stamp.made").write_text(f"{tmp_path.resolve()}\n{python.resolve()}\n")
    argv = ["sh", "-c", f'"$0" --list {closed}', str(tmp_path / "inv")]
    subprocess.run(argv, check=True, timeout=30)
    assert (tmp_path / "found").read_text() == ""
