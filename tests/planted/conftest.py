"""The tree of the real wheel, for rows of the planted table (tests/table.py).

What is compared is everything that verify said, so a neighbour that spoke up fails the row as
surely as a check that stayed silent; the same verify on the clean state, before and after, shows
that the check can pass.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy import flow, submission, wheel
from deploy.bundle import Bundle
from deploy.carriers.local import lay_root
from deploy.layout import HERE


@dataclass(frozen=True)
class Site:
    """A root laid from the demo's wheel, with the demo's bundle deployed into it."""

    root: Path
    bundle: Bundle
    home: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Path:
        return self.root / self.bundle.plan.site.lstrip("/")

    @property
    def launch(self) -> Path:
        return self.root / self.bundle.plan.launch_dir.lstrip("/")

    @property
    def python(self) -> Path:
        return self.root / self.bundle.plan.python.lstrip("/")

    def agent(
        self, *argv: str, under: Sequence[str] = (), **env: str
    ) -> tuple[int, dict[str, Any]]:
        """Run the bundle in a process of its own; return its exit code and evidence."""
        done = self._run(argv, under, env)
        assert done.stdout, done.stderr.decode()
        return done.returncode, json.loads(done.stdout)

    def killed(self, *argv: str, under: Sequence[str]) -> bool:
        """Run the bundle under a tool that kills it; True when it was killed indeed."""
        return self._run(argv, under, {}).returncode == -signal.SIGKILL

    def _run(
        self, argv: Sequence[str], under: Sequence[str], env: dict[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*under, sys.executable, "-I", "-S", self.bundle.path, *argv, "--root", self.root],
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **env},
            capture_output=True,
            timeout=120,
            check=False,
        )

    def said(self, *argv: str, **env: str) -> tuple[int, set[tuple[str, str]]]:
        """What verify found wrong: (path, state) for files, (place, "shadowed") for imports."""
        code, evidence = self.agent("verify", *argv, **env)
        rows = {(r["path"], r["state"]) for r in evidence["files"] if r["state"] != "ok"}
        places = {(p, o["state"]) for p, o in evidence["origin"].items() if o["state"] != "ok"}
        assert set(evidence["origin"]) == {"empty", "launch"}
        return code, rows | places


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[submission.Submission, Bundle]:
    found = submission.resolve(submission.load("demo", HERE), HERE)
    out = tmp_path_factory.mktemp("bundle")
    return found, bundles.pack(found.plan, found.inputs, flow.fill(found), out)


@pytest.fixture(scope="session")
def pristine(
    demo_bundle: tuple[submission.Submission, Bundle], tmp_path_factory: pytest.TempPathFactory
) -> Site:
    """The base's tree as the wheel gives it; nothing was deployed into it."""
    found, made = demo_bundle
    root = tmp_path_factory.mktemp("planted") / "root"
    assert found.wheel is not None
    pinned = found.wheel
    lay_root(
        root,
        python=made.plan.python,
        site=made.plan.site,
        launch_dir=made.plan.launch_dir,
        fill=lambda site: wheel.unpack(pinned, site),
    )
    return Site(root=root, bundle=made, home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def deployed(pristine: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Another root of the same kind, deployed once; every test must leave it as it was."""
    root = tmp_path_factory.mktemp("deployed") / "root"
    # Hard links are enough: the agent never writes in place, and plants must not either.
    shutil.copytree(pristine.root, root, copy_function=os.link, symlinks=True)
    site = Site(root=root, bundle=pristine.bundle, home=pristine.home)
    relocate(pristine, site)
    code, evidence = site.agent("deploy")
    assert code == 0, evidence["error"]
    return site


def relocate(old: Site, new: Site) -> None:
    """The stand-in python3 names its root; a copied root needs one that names the copy."""
    for path in (new.python, new.root / "usr/lib/stand-in/sitecustomize.py"):
        text, mode = path.read_text(), path.stat().st_mode
        path.unlink()
        path.write_text(text.replace(str(old.root), str(new.root)))
        path.chmod(mode)


@pytest.fixture
def clean(deployed: Site) -> Iterator[Site]:
    """The deployed site; clean before the test and, whatever it planted, clean after it."""
    assert deployed.said("--recompile") == (0, set())
    yield deployed
    assert deployed.said("--recompile") == (0, set())
