"""Say whose interpreter runs a server: base.python as the service starts it, or another one.

A command line proves little: base.python may be a script that starts another program, and every
venv of a machine runs one file. So the real file is compared, and the venv that its name leads to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .child import Child
from .probe import _SHELL
from .words import BundleError

if TYPE_CHECKING:
    from .main import Call

_GONE = " (deleted)"
_MARK = "\0dcu-bundle:interpreter\0"
_ASK = f"""
import json, os, sys
file = os.stat("/proc/self/exe")
venv = "" if sys.prefix == sys.base_prefix else os.path.realpath(sys.prefix)
said = [os.readlink("/proc/self/exe"), file.st_dev, file.st_ino, venv, dict(os.environ)]
print({_MARK!r} + json.dumps(said))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A running interpreter: its real file, and its venv's folder ("" where it is of none).

    `venv` is None where it cannot be told. `environment` is what it was given where we started it
    as the service is: by env_script, by the container, by a script that is base.python.
    """

    path: str
    device: int
    inode: int
    venv: str | None
    environment: Mapping[str, str] | None = field(default=None, compare=False, repr=False)

    def runs(self, other: Interpreter) -> bool:
        """True when both run one file. A path counts too: an update replaces it meanwhile."""
        here, there = (self.device, self.inode), (other.device, other.inode)
        return here == there or self.path == other.path

    def __str__(self) -> str:
        return f"{self.path} of {self.venv}" if self.venv else self.path


def of_service(call: Call) -> Interpreter | None:
    """Start base.python as the service would be, and return what then runs; None: it is silent."""
    request, tree = call.request, call.tree
    script = tree.from_root(request.env_script) if request.env_script else ""
    folder = tree.from_root(request.launch_dir) if request.launch_dir else "/"
    try:
        shell = ("/bin/sh", "-c", _SHELL, "sh", folder, script)
        child = Child((*shell, call.python_path(), "-c", _ASK), {**os.environ, **request.env})
        _, out, _ = child.finish(request.timeout)
        answer = out.decode("utf-8", "surrogateescape").rpartition(_MARK)[2]
        path, device, inode, venv, given = json.loads(answer.partition("\n")[0])
        return Interpreter(str(path), int(device), int(inode), str(venv), dict(given))
    except (BundleError, OSError, ValueError, TypeError):
        return None


def of_process(
    pid: int, argv: Sequence[str], environment: Mapping[str, str], folder: str
) -> Interpreter | None:
    """Return what runs as `pid`, which was started in `folder`; None where nobody may look."""
    try:
        path, file = os.readlink(f"/proc/{pid}/exe"), os.stat(f"/proc/{pid}/exe")
    except OSError:
        return None
    found = Interpreter(path.removesuffix(_GONE), file.st_dev, file.st_ino, None)
    program = _program(argv[0] if argv else "", environment.get("PATH", ""), folder)
    venv = _venv(program) if _leads_to(program, found) else None
    return Interpreter(found.path, found.device, found.inode, venv)


def state(found: Interpreter | None, wanted: Interpreter | None) -> str:
    """Return "ok", "other", or "unknown" where one of them cannot be told."""
    if found is None or wanted is None:
        return "unknown"
    if not found.runs(wanted):
        return "other"
    return "unknown" if found.venv is None else "ok" if found.venv == wanted.venv else "other"


def document(found: Interpreter | None, wanted: Interpreter | None) -> dict[str, Any]:
    return {
        "state": state(found, wanted),
        "found": str(found or ""),
        "wanted": str(wanted or ""),
    }


def _program(word: str, path: str, folder: str) -> str:
    """Return the file that a command's first word names, "" where there is none."""
    places = [folder] if "/" in word else [os.path.join(folder, one) for one in path.split(":")]
    for place in places if word else ():
        file = os.path.join(place, word)
        if os.access(file, os.X_OK) and not os.path.isdir(file):
            return os.path.abspath(file)
    return ""


def _leads_to(program: str, found: Interpreter) -> bool:
    try:
        file = os.stat(program)
    except OSError:
        return False
    real = os.path.realpath(program)
    return found.runs(Interpreter(real, file.st_dev, file.st_ino, None))


def _venv(program: str) -> str:
    """Return the venv of an interpreter as Python's `site` finds it: by its name, not its file."""
    folder = os.path.dirname(program)
    top = os.path.dirname(folder)
    marked = any(os.path.isfile(os.path.join(one, "pyvenv.cfg")) for one in (folder, top))
    return os.path.realpath(top) if marked else ""
