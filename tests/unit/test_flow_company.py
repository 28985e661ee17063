"""Calls that meet each other, users without a name, and callers without streams."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import flow
from deploy.agent.plan import Plan
from deploy.agent.words import BundleError, Exit, Verb
from deploy.bundle import Bundle
from deploy.carriers import Request
from deploy.carriers.local import Local, lay_root
from deploy.errors import BadValues
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


def test_an_agent_that_ended_with_the_interrupt_key_needs_no_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had not begun: one that is at work handles the key itself."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nkill -INT $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    plan = Plan(name="n", package="p", python="/usr/bin/python3", site="/s")
    bundle = Bundle(path=tmp_path / "a.pyz", sha256="", plan=plan, inputs={}, agent="")
    with pytest.raises(BundleError, match="interrupted") as caught:
        Local(tmp_path).deliver(bundle, Request(verb=Verb.VERIFY))
    assert caught.value.exit is Exit.INTERRUPTED


def test_a_root_that_a_killed_call_left_half_laid_goes(tmp_path: Path) -> None:
    left = tmp_path / ".root.1/usr"
    left.mkdir(parents=True)
    left.chmod(0o500)
    (tmp_path / "rootless").mkdir()
    lay_root(
        tmp_path / "root",
        python="/usr/bin/python3",
        site="/usr/lib/site",
        launch_dir="/launch",
        fill=lambda place: place.mkdir(),
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["root", "rootless"]


def test_a_source_that_is_not_there_is_said_before_git_is_asked(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.manifest("x").parent.mkdir()
    layout.manifest("x").write_text(
        "schema: 1\nname: x\nbase: {python: /usr/bin/python3, site: /s}\n"
        f"source: {{git: gone, base: {'1' * 40}, head: {'2' * 40}, package: vllm}}\n"
        'overlay: {include: ["vllm/**"]}\n'
    )
    for worktree in (False, True):
        with pytest.raises(BadValues) as caught:
            flow.plan("x", layout, worktree=worktree)
        assert caught.value.what == f"source.git {layout.top / 'gone'} is not there"
        assert "git fsck" not in caught.value.fix
