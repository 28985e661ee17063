"""A real target below a temporary folder, and a real bundle that is run on it as a process."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.agent.words import canonical

AGENT = Path(__file__).resolve().parents[2] / "deploy" / "agent"
SITE = "/usr/lib/python3/dist-packages"
PACKAGE = "pack"
BASE_FILES = {
    "pack/__init__.py": b"",
    "pack/core.py": b"V = 'base'\n",
    "pack/old.py": b"OLD = 1\n",
    "pack/lonely/__init__.py": b"ALONE = 1\n",
    "pack/table.json": b"{}\n",
    "pack/tool.py": b"TOOL = 1\n",
    "other/__init__.py": b"",
    "pack-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: pack\nVersion: 1.0\n",
}
# A usual change: modified, new package, data, deleted (one leaves an empty folder).
NEW_FILES = {
    "pack/core.py": b"V = 'ours'\n",
    "pack/fresh/__init__.py": b"from pack.core import V as SEEN\n",
    "pack/table.json": b'{"a": 1}\n',
    "pack/old.py": None,
    "pack/lonely/__init__.py": None,
}


def state(data: bytes | None, mode: str = "0644") -> State:
    if data is None:
        return ABSENT
    sha = hashlib.sha256(data).hexdigest()
    return State(type="file", mode=mode, sha256=sha, size=len(data))


def role(path: str) -> str:
    return "module" if path.endswith(".py") else "data"


def planned(
    path: str, want: bytes | None, *, mode: str = "0644", assume: Sequence[bytes | None] = ()
) -> PlannedFile:
    before = tuple(state(data) for data in assume) or (state(BASE_FILES.get(path)),)
    return PlannedFile(path=path, role=role(path), want=state(want, mode), assume=before)


@dataclass
class Outcome:
    """What one run of the agent said."""

    code: int
    evidence: dict[str, Any]
    err: str

    @property
    def states(self) -> dict[str, str]:
        """Path -> state of every file that is not ok."""
        return {r["path"]: r["state"] for r in self.evidence["files"] if r["state"] != "ok"}

    @property
    def told(self) -> str:
        """Exit code and first line of an error, which must be what, why and fix."""
        return f"exit {self.code}: {self._error()[0]}"

    @property
    def reason(self) -> str:
        """Exit code and the very cause that the error's why ends with."""
        return f"exit {self.code}: {self._error()[1].rpartition(': ')[2]}"

    def _error(self) -> tuple[str, str]:
        lines = self.err.splitlines()
        why = next(n for n, line in enumerate(lines) if line.startswith("  why: "))
        assert any(line.startswith("  fix: ") for line in lines[why + 1 :]), self.err
        return lines[why - 1], lines[why]


@dataclass
class Bundle:
    """A self-running zip in the product's layout, made from the tree's own agent sources."""

    path: Path
    plan: Plan

    @classmethod
    def write(cls, path: Path, plan: Plan, blobs: Mapping[str, bytes]) -> Bundle:
        """Write one member by member; unlike `deploy.bundle.pack` it takes wrong contents too."""
        members = {f"agent/{source.name}": source.read_bytes() for source in AGENT.glob("*.py")}
        members["__main__.py"] = members.pop("agent/__main__.py")
        members["plan.json"], members["inputs.json"] = canonical(plan.to_json()), b"{}"
        members |= {f"blobs/{sha}": data for sha, data in blobs.items()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
            for name, data in sorted(members.items()):
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.create_system, info.external_attr = 3, 0o100644 << 16
                file.writestr(info, data)
        return cls(path, plan)


@dataclass
class Target:
    """A root with a site and an interpreter; every change to it goes through the agent."""

    root: Path
    python: str = sys.executable
    site: str = SITE
    env: dict[str, str] = field(default_factory=dict)
    count: int = 0
    bundled: Any = None  # the bundle that `states` asks about

    @property
    def top(self) -> Path:
        return self.root / self.site.strip("/")

    def make(self, files: Mapping[str, bytes]) -> None:
        for path, data in files.items():
            self.write(path, data)
        self.use(self.python)
        (self.root / "launch").mkdir(exist_ok=True)

    def use(self, python: str, *, first: bool = True, sited: Path | None = None) -> None:
        """Let /usr/bin/python3 be this interpreter, with the site on its path.

        `first` False puts the site where a container has it, behind the user site; `sited` is one
        more folder whose .pth files count.
        """
        launcher = self.root / "usr/bin/python3"
        launcher.parent.mkdir(parents=True, exist_ok=True)
        own = self.root.parent / "own"
        place = str(self.top)
        if not first:
            own.mkdir(exist_ok=True)
            lines = [f"import site, sys\nsys.path.remove({str(own)!r})\n"]
            lines += [
                f"site.addsitedir({str(folder)!r})\n" for folder in (self.top, sited) if folder
            ]
            (own / "sitecustomize.py").write_text("".join(lines))
            place = str(own)
        launcher.write_text(
            f'#!/bin/sh\nPYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{place}"\nexport PYTHONPATH\n'
            f'exec "{python}" "$@"\n'
        )
        launcher.chmod(0o755)

    def base_python(self) -> str:
        """Return this machine's own interpreter: one in a virtual environment has no user site."""
        return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())

    def states(self, *options: str, bundle: Bundle | None = None) -> dict[str, str]:
        """Verify in a fresh process; return the files that are not ok."""
        return self.run(bundle or self.bundled, "verify", *options).states

    def imported(self, module: str, name: str = "V") -> str:
        """Import a module as the service would, and return one of its values, or the error."""
        code = (
            "import importlib, sys\n"
            "try: print(getattr(importlib.import_module(sys.argv[1]), sys.argv[2]))\n"
            "except ImportError as err: print(type(err).__name__)\n"
        )
        argv = [str(self.root / "usr/bin/python3"), "-B", "-c", code, module, name]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    def bundle_of(
        self, path: str, want: bytes | None, *, assume: Sequence[bytes | None] = ()
    ) -> Bundle:
        """Return a bundle of one file."""
        return self.bundle(self.plan(planned(path, want, assume=assume)), [want])

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        place = self.top / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(mode)

    def read(self, path: str) -> bytes:
        return (self.top / path).read_bytes()

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.top / path)

    def plan(self, *files: PlannedFile, **more: Any) -> Plan:
        values: dict[str, Any] = {
            "name": "test",
            "package": PACKAGE,
            "python": "/usr/bin/python3",
            "site": self.site,
            "launch_dir": "/launch",
            "requires": {"pack": "1.0"},
            "files": tuple(sorted(files, key=lambda entry: entry.path)),
        }
        return Plan(**{**values, **more})

    def bundle(self, plan: Plan, contents: Sequence[bytes | None]) -> Bundle:
        blobs = {hashlib.sha256(d).hexdigest(): d for d in contents if d is not None}
        self.count += 1
        return Bundle.write(self.root.parent / f"b{self.count}.pyz", plan, blobs)

    def usual(self, files: Mapping[str, bytes | None] | None = None) -> Bundle:
        """Return a bundle of the usual change."""
        files = NEW_FILES if files is None else files
        plan = self.plan(*(planned(path, data) for path, data in files.items()))
        return self.bundle(plan, list(files.values()))

    def run(
        self, bundle: Bundle, verb: str, *options: str, wrap: Sequence[str] = (), python: str = ""
    ) -> Outcome:
        argv = [*wrap, python or self.python, "-I", "-S", str(bundle.path), verb]
        argv += ["--root", str(self.root), *options]
        env = {**os.environ, **self.env}
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=120, env=env, check=False
        )
        evidence = json.loads(done.stdout) if done.stdout.strip() else {}
        return Outcome(done.returncode, evidence, done.stderr)

    def snapshot(self, *, inodes: bool = True) -> dict[str, Any]:
        """Return everything below the root but times of folders and of reading."""
        found: dict[str, Any] = {}
        for folder, folders, files in os.walk(self.root):
            for name in folders + files:
                path = Path(folder, name)
                info = path.lstat()
                row: list[Any] = [oct(info.st_mode), info.st_uid, info.st_gid]
                if stat.S_ISREG(info.st_mode):
                    row += [path.read_bytes(), info.st_mtime_ns]
                    row += [info.st_ino] if inodes else []
                elif stat.S_ISLNK(info.st_mode):
                    row += [os.readlink(path)]
                found[str(path.relative_to(self.root))] = row
        return found


def pythons() -> dict[str, str]:
    """Return version -> interpreter of what this machine has and starts."""
    found = {}
    shelves = [Path("/usr/bin"), Path("/usr/local/bin")]
    shelves += sorted((Path.home() / ".pyenv/versions").glob("*/bin"))
    for version in ("2.7", "3.6", "3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13"):
        for path in (shelf / f"python{version}" for shelf in shelves):
            if path.exists():
                found[version] = str(path)
    return found


def compile_all(target: Target) -> None:
    """Let an interpreter write its usual caches, as an image has them."""
    argv = [target.python, "-m", "compileall", "-q", str(target.top)]
    subprocess.run(argv, check=True, timeout=60)


def assert_usable(target: Target) -> None:
    """Deploy, verify and restore the usual change without one alarm, and leave nothing of it."""
    before, bundle = target.snapshot(), target.usual()
    for verb, *options in (("deploy",), ("verify", "--recompile"), ("restore",)):
        outcome = target.run(bundle, verb, *options)
        assert (outcome.code, outcome.states if verb == "verify" else {}) == (0, {}), outcome.err
    assert difference(before, target.snapshot()) == {}


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two snapshots do not have in common."""
    paths = one.keys() | other.keys()
    return {p: (one.get(p), other.get(p)) for p in sorted(paths) if one.get(p) != other.get(p)}
