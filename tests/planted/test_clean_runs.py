"""No false alarm: fifty clean runs, each in an environment of its own, end as the first one did.

A run is what an operator does: check, deploy, verify, audit, deploy again, restore. Umask, time
zone, locale, HOME, user, folder, interpreter, limits and clutter in the environment all vary; the
evidence outside of its incidental part may not.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy.agent.listing import Entry, text_of
from tests.agent.target import BASE_FILES, NEW_FILES, Target, difference, planned, pythons
from tests.table import Found, plants

pytestmark = pytest.mark.slow

RUNS = 50
NOBODY = 65534
SYSTEM = "/usr/bin/python3"
CHOICES: dict[str, list[Any]] = {
    "umask": [0o022, 0o077, 0o000, 0o777, 0o027],
    "TZ": ["UTC", "Asia/Shanghai", "America/St_Johns", "XYZ-14", "", None],
    "LC_ALL": ["C", "C.UTF-8", "zh_CN.GB18030", "tr_TR.UTF-8", "nonsense", None],
    "HOME": ["/root", "/nonexistent", "", None],
    "user": ["own", "own", "nobody"],
    "folder": ["plain", "with space", "中文 路径", "q'uo\"te", "-dash", "déjà", "a" * 120,
               "%s{}$x"],
    "python": ["3.10", "3.11", "3.12", "3.13", "own"],
    "cwd": ["/", "/tmp", "bundle", "root", "holds a package", "gone"],
    "PYTHONHASHSEED": ["0", "random", "4294967295", None],
    "PYTHONDONTWRITEBYTECODE": ["1", None],
    "PYTHONWARNINGS": ["error", None],
    "PYTHONIOENCODING": ["ascii", "utf-16", None],
    "clutter": [{}, {"LD_BIND_NOW": "1", "PS4": "+ $(exit 1)", "BASH_ENV": "/nonexistent"},
                {"ENV": "/nonexistent", "CDPATH": "/tmp", "IFS": "x", "POSIXLY_CORRECT": "1"},
                {"x" * 3000: "y" * 60_000}, {"http_proxy": "http://127.0.0.1:9", "COLUMNS": "1"}],
    "files": [64, 256, 4096],
    "stdin": ["null", "closed", "pipe"],
    "PATH": ["/usr/bin:/bin", "", ".", None],
    "root": ["absolute", "relative", "through a link", "trailing slash"],
}  # fmt: skip


def chosen(number: int) -> dict[str, Any]:
    """Settings of one run: each value of each row is met in every few runs, in ever new company."""
    made = {}
    for name, values in CHOICES.items():
        order = values * (RUNS // len(values) + 1)
        random.Random(name).shuffle(order)
        made[name] = order[number]
    return made


@dataclass
class Place:
    """A target and its bundle below a folder that another user can reach."""

    target: Target
    bundle: Path
    settings: Mapping[str, Any]
    python: str

    def run(self, *argv: str) -> tuple[int, dict[str, Any]]:
        chosen = self.settings
        names = ("TZ", "LC_ALL", "HOME", "PATH", *(n for n in chosen if n.startswith("PYTHON")))
        env = {name: chosen[name] for name in names if chosen[name] is not None}
        command = [self.python, "-I", "-S", str(self.bundle), *argv, "--root", self._root()]
        stdin = {"null": subprocess.DEVNULL, "pipe": subprocess.PIPE, "closed": None}
        done = subprocess.run(
            ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command]
            if chosen["stdin"] == "closed"
            else command,
            env={**env, **chosen["clutter"]},
            cwd=self._cwd(),
            stdin=stdin[chosen["stdin"]],
            capture_output=True,
            timeout=120,
            check=False,
            preexec_fn=self._before,
        )
        assert done.stdout, done.stderr.decode("utf-8", "replace")
        return done.returncode, json.loads(done.stdout)

    def _root(self) -> str:
        root, kind = self.target.root, self.settings["root"]
        if kind == "relative" and self.settings["cwd"] == "bundle":
            return os.path.relpath(root, self.bundle.parent)
        if kind == "through a link":
            link = root.with_name("link")
            if not link.is_symlink():
                link.symlink_to(root)
            return str(link)
        return f"{root}/" if kind == "trailing slash" else str(root)

    def _cwd(self) -> str:
        kind = self.settings["cwd"]
        named = {"bundle": self.bundle.parent, "root": self.target.root}
        return str(named.get(kind, kind if kind.startswith("/") else self.bundle.parent / "cwd"))

    def _before(self) -> None:
        if self.settings["cwd"] == "gone":
            os.mkdir("gone")
            os.chdir("gone")
            os.rmdir("../gone")
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.settings["files"],) * 2)
        os.umask(self.settings["umask"])
        if self.settings["user"] == "nobody":
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)


@cache
def system_python_fits() -> bool:
    ask = "import sys; sys.exit(sys.version_info < (3, 10))"
    try:
        return subprocess.run([SYSTEM, "-c", ask], check=False, timeout=30).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One bundle for all runs: what differs must be the environment alone."""
    folder = tmp_path_factory.mktemp("packed")
    return pack(Target(folder / "root"), folder)


@pytest.fixture
def place(request: pytest.FixtureRequest, packed: Path) -> Iterator[Place]:
    settings = chosen(request.param)
    python = pythons().get(settings["python"], sys.executable)
    if settings["user"] == "nobody":
        if os.geteuid() != 0 or not system_python_fits():
            pytest.skip("only root can become another user, and a system Python >= 3.10 is needed")
        python = SYSTEM
    top = Path(tempfile.mkdtemp(prefix="clean-"))
    top.chmod(0o755)
    folder = top / settings["folder"]
    folder.mkdir()
    target = Target(folder / "root", python=python)
    target.make(BASE_FILES)
    launcher(target)
    (folder / "cwd/pack").mkdir(parents=True)
    (folder / "cwd/pack/__init__.py").write_text("V = 'not the one'\n")
    bundle = folder / packed.name
    shutil.copyfile(packed, bundle)
    made = Place(target, bundle, settings, python)
    if settings["user"] == "nobody":
        for path in (top, *top.rglob("*")):
            os.lchown(path, NOBODY, NOBODY)
    yield made
    shutil.rmtree(top)


def launcher(target: Target) -> None:
    """A stand-in interpreter that bears any folder's name."""
    site, python = shlex.quote(str(target.top)), shlex.quote(target.python)
    path = target.root / "usr/bin/python3"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {python} "$@"\n')


def pack(target: Target, folder: Path) -> Path:
    plan = target.plan(*(planned(path, data) for path, data in NEW_FILES.items()))
    contents = {hashlib.sha256(d).hexdigest(): d for d in NEW_FILES.values() if d is not None}
    base = [
        Entry(path, hashlib.sha256(data).hexdigest(), len(data), "0644")
        for path, data in BASE_FILES.items()
        if not path.startswith("other/")
    ]
    text = text_of(base)
    inputs = {"base_files": {"from": "tree", "sha256": hashlib.sha256(text.encode()).hexdigest()}}

    def fill(wanted: Iterator[tuple[str, bundles.Sink]]) -> None:
        for sha, sink in wanted:
            sink.write(contents[sha])

    return bundles.pack(plan, inputs, fill, folder, listing=text).path


def equal_part(evidence: Mapping[str, Any]) -> str:
    """What two equal targets must say alike, whatever they run on."""
    kept = {
        k: v for k, v in evidence.items() if k not in ("incidental", "python", "origin", "traps")
    }
    return re.sub(r"cpython-3\d+", "cpython", json.dumps(kept, sort_keys=True))


_FIRST: dict[str, str] = {}


@plants("nothing, 50 times, in varied environments")
@pytest.mark.parametrize("place", range(RUNS), indirect=True)
def test_a_clean_run_raises_no_alarm_in_any_environment(place: Place, found: Found) -> None:
    before = place.target.snapshot()
    expected = {
        ("check",): (10, "would change"),
        ("deploy",): (0, "deployed"),
        ("verify", "--recompile"): (0, "verified"),
        ("verify", "--all"): (0, "verified"),
        ("deploy", "--wait", "1"): (0, "nothing to do"),
        ("restore",): (0, "restored"),
    }
    for argv, (code, outcome) in expected.items():
        ended, evidence = place.run(*argv)
        assert (ended, evidence["outcome"]) == (code, outcome), (argv, evidence["error"])
        assert not [trap for trap in evidence.get("traps", ()) if trap["harm"]]
        states = {where: o["state"] for where, o in evidence["origin"].items()}
        assert set(states.values()) <= {"ok"}, evidence["origin"]
        if argv == ("verify", "--all"):
            audit = evidence["audit"]
            assert (audit["files"], audit["faults"]) == ([], [])
        if argv != ("verify", "--all"):  # how many pycs there are depends on the interpreters met
            said = equal_part(evidence)
            assert said == _FIRST.setdefault(" ".join(argv), said)
    assert difference(before, place.target.snapshot()) == {}
    found("nothing to find: check, deploy, verify, audit, restore")


def test_every_value_of_every_setting_is_met() -> None:
    met: dict[str, list[Any]] = {name: [] for name in CHOICES}
    for number in range(RUNS):
        for name, value in chosen(number).items():
            met[name].append(value)
    assert [n for n, values in CHOICES.items() if any(v not in met[n] for v in values)] == []
