"""The carrier for a folder on this machine, and the laying of a pristine root to deploy into.

A root is what a container's ``/`` would be. `lay_root` makes one from a pinned wheel with a small
stand-in for the container's python3, so that import origin can be proven, and can fail, without a
container.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.bundle import Bundle
from deploy.carriers import Request
from deploy.errors import BadValues, BundleError, Exit, Refused
from deploy.evidence import Evidence, parse

# Marks a root that this product laid, and may therefore lay again.
LAID = ".laid-by-inv"

_PYTHON = """\
#!/bin/sh
# Stand-in for a container's python3: this machine's interpreter with the root's site on its path.
PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{own} exec {real} "$@"
"""

_SITECUSTOMIZE = '''\
"""Puts the root's site where a container's dist-packages would be: after the user site."""
import os
import site
import sys

OWN = os.path.dirname(os.path.abspath(__file__))
ROOT = {root!r}
SITE = {site!r}

# Nothing of the stand-in itself may be seen by the code that runs under it.
sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != OWN]
rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p != OWN]
os.environ["PYTHONPATH"] = os.pathsep.join(rest)
if not os.environ["PYTHONPATH"]:
    del os.environ["PYTHONPATH"]
sys.executable = ROOT + {python!r}
# Packages of this machine's own interpreter do not exist in the container.
own_sites = set(site.getsitepackages())
sys.path[:] = [p for p in sys.path if p not in own_sites]
site.addsitedir(ROOT + SITE)
'''


@dataclass(frozen=True, slots=True)
class Local:
    """A target that is a folder on this machine."""

    root: Path

    @property
    def name(self) -> str:
        return f"local:{self.root}"

    def deliver(self, bundle: Bundle, request: Request) -> Evidence:
        """Run the bundle on the folder, in a process of its own; its step lines go to stderr.

        What the evidence holds is for the report to say: else a terminal shows it twice.
        """
        argv = [sys.executable, "-I", "-S", str(bundle.path), *request.steps_only().to_argv()]
        argv += ["--root", str(self.root)]
        agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            out, _ = agent.communicate()
        except KeyboardInterrupt:
            # The agent got the same ^C and decides itself: undo, or finish past its commit point.
            out, _ = agent.communicate()
        if agent.returncode == -signal.SIGINT:
            raise BundleError(
                f"interrupted on {self.name}",
                why="the agent was still being loaded",
                fix="run it again; nothing was changed by it",
                exit=Exit.INTERRUPTED,
            )
        if not out.strip():
            raise BundleError(
                f"the agent gave no evidence on {self.name}",
                why=f"it ended with {agent.returncode} and printed nothing on stdout",
                fix="its last words are above; run `./inv verify` to see what state it left",
                exit=Exit.BUG if agent.returncode >= 0 else Exit.NEEDS_PERSON,
            )
        return parse(out)


def lay_root(
    root: Path, *, python: str, site: str, launch_dir: str, fill: Callable[[Path], None]
) -> None:
    """Make `root` anew: the site filled by `fill`, a stand-in python3, an empty launch folder.

    The new root is made beside the old one and swapped in, so that an interrupted call leaves the
    old root or none, never half of one.

    Raises:
        Refused: there is a folder at `root` that was not laid by this function.
    """
    if root.exists() and not (root / LAID).exists():
        raise Refused(
            f"will not replace {root}",
            why="it was not laid by this product, so it may be somebody's work",
            fix="deploy into it with `-t local:ROOT`, or move it away",
        )
    for left in root.parent.glob(f".{root.name}.*"):
        remove_tree(left)  # of a call that was killed: the caller lets nobody else in
    beside = root.with_name(f".{root.name}.{os.getpid()}")
    try:
        (beside / site.lstrip("/")).parent.mkdir(parents=True)
        fill(beside / site.lstrip("/"))
        (beside / launch_dir.lstrip("/")).mkdir(parents=True, exist_ok=True)
        _lay_python(beside, root, python, site)
        (beside / LAID).write_text("made by inv; safe to delete\n")
        remove_tree(root)
        beside.rename(root)
    finally:
        remove_tree(beside)


def _lay_python(beside: Path, root: Path, python: str, site: str) -> None:
    own = root / "usr/lib/stand-in"
    stand_in = beside / python.lstrip("/")
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text(_PYTHON.format(own=shlex.quote(str(own)), real=shlex.quote(_real_python())))
    stand_in.chmod(0o755)
    (beside / "usr/lib/stand-in").mkdir(parents=True)
    (beside / "usr/lib/stand-in/sitecustomize.py").write_text(
        _SITECUSTOMIZE.format(root=str(root), site=site, python=python)
    )


def _real_python() -> str:
    """This machine's own interpreter, not the virtual environment that we run in."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    return str(Path(base).resolve())


def remove_tree(path: Path) -> None:
    """Remove a folder of ours, read-only folders inside it included; nothing when it is absent."""
    if not path.exists():
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path)


def parse_local(text: str) -> Local:
    """Return the carrier of ``local:ROOT``.

    Raises:
        BadValues: the folder does not exist, or no folder can have this name.
    """
    try:
        root = Path(text).expanduser()
        if root.is_dir():
            return Local(root.resolve())
        why = f"{root} is not a folder"
    except (OSError, RuntimeError) as err:  # a name too long, a user that has no home
        why = getattr(err, "strerror", "") or str(err)
    raise BadValues(
        f"there is no target local:{text}",
        why=why,
        fix="name a folder that is there; `./inv reproduce` lays one for a wheel's manifest",
    )
