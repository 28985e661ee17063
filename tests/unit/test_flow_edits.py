"""A repository, a vendor's target and an editor: listing, lock, diff, deploy, and the edit loop."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from deploy import flow, page, report, reporting
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.errors import BadValues, Differs
from deploy.layout import Layout
from tests.agent.target import BASE_FILES, SITE, Target

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "init.defaultBranch=m")
CORE = "pack/core.py"
VENDORS = b"V = 'base'\n# the vendor's own line\n"
MANIFEST = """\
schema: 1
name: mine
base:
  python: /usr/bin/python3
  site: {site}
  requires: {{pack: "1.0"}}
source:
  git: repo
  base: {base}
  head: {head}
  package: pack
overlay:
  include: ["pack/**"]
{accept}
launch:
  dir: /launch
"""
ACCEPT = """\
  accept:
    pack/core.py: {{sha256: ["{sha}"], why: the vendor patches it}}
"""


class Bench:
    """A checkout with one git manifest, and a target as its vendor made it."""

    def __init__(self, folder: Path) -> None:
        self.layout = Layout(folder / "checkout")
        self.repo = self.layout.top / "repo"
        self.repo.mkdir(parents=True)
        self.layout.manifest("mine").parent.mkdir()
        self.target = Target(folder / "target" / "root")
        self.target.root.mkdir(parents=True)
        self.target.make(BASE_FILES)
        self.to = f"local:{self.target.root}"
        self.git("init", "-q")
        for path, data in BASE_FILES.items():
            if path.startswith("pack/"):
                self.write(path, data)
        self.base = self.commit()
        self.write(CORE, b"V = 'ours'\n")
        self.head = self.commit()
        self.describe()

    def describe(self, accept: str = "") -> None:
        text = MANIFEST.format(site=SITE, base=self.base, head=self.head, accept=accept)
        self.layout.manifest("mine").write_text(text)

    def git(self, *args: str) -> str:
        argv = ("git", *IDENTITY, *args)
        done = subprocess.run(argv, cwd=self.repo, capture_output=True, check=True, timeout=60)
        return done.stdout.decode().strip()

    def write(self, path: str, data: bytes) -> None:
        (self.repo / path).parent.mkdir(parents=True, exist_ok=True)
        (self.repo / path).write_bytes(data)

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", "x")
        return self.git("rev-parse", "HEAD")

    def run(self, verb: Verb, *, worktree: bool = False, **options: Any) -> Any:
        request = Request(verb=verb, options=options)
        [visit] = flow.run("mine", self.to, request, self.layout, worktree=worktree)
        return visit

    def deploy(self, *, worktree: bool = False) -> Any:
        request = Request(verb=Verb.DEPLOY)
        [visit] = flow.deploy("mine", self.to, request, self.layout, worktree=worktree)
        return visit


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_base_commit_is_the_listing_of_a_package_from_git(bench: Bench) -> None:
    made, _ = flow.lock("mine", bench.layout)
    assert made.inputs["base_files"]["from"] == "tree"
    [visit] = flow.deploy("mine", bench.to, Request(verb=Verb.DEPLOY), bench.layout)
    assert visit.exit == 0

    clean = bench.run(Verb.VERIFY, all=True)
    bench.target.write("pack/tool.py", b"TOOL = 'edited'\n")
    edited = bench.run(Verb.VERIFY, all=True)

    assert clean.exit == 0
    assert clean.evidence.raw["audit"]["owners"]["ours"] == [CORE]
    assert any("the whole package was read" in proof for proof in clean.gates[0].proofs)
    assert edited.exit == 10
    assert any(fault.startswith("foreign: pack/tool.py") for fault in edited.gates[0].faults)


def test_a_vendors_bytes_are_shown_by_lock_and_accepted_by_name_only(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.target.write(CORE, VENDORS)
    bench.target.write("pack/blas.so", b"\x7fELF")

    path, changed = flow.list_base("mine", bench.to, bench.layout)
    made, _ = flow.lock("mine", bench.layout)

    assert (path.name, changed) == ("mine.files", True)
    assert flow.list_base("mine", bench.to, bench.layout)[1] is False
    assert made.inputs["base_files"]["from"] == "files"
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if "vendor's own" in line]
    sha = line.split("(")[1].split(")")[0]
    assert CORE in line
    [refused] = flow.deploy("mine", bench.to, Request(verb=Verb.DEPLOY), bench.layout)
    assert refused.exit == 6

    bench.describe(ACCEPT.format(sha=sha))
    flow.lock("mine", bench.layout)
    assert "vendor's own" not in capsys.readouterr().err
    [visit] = flow.deploy("mine", bench.to, Request(verb=Verb.DEPLOY), bench.layout)
    audited = bench.run(Verb.VERIFY, all=True)
    assert (visit.exit, audited.exit) == (0, 0)
    owners = audited.evidence.raw["audit"]["owners"]
    assert owners["vendor"] == ["pack-1.0.dist-info/METADATA", "pack/blas.so"]
    assert "pack/tool.py" in owners["base"]


def test_a_listing_that_changed_makes_the_lock_stale(bench: Bench) -> None:
    from deploy.errors import StaleLock

    flow.list_base("mine", bench.to, bench.layout)
    flow.lock("mine", bench.layout)
    path = bench.layout.files("mine")
    path.write_text(path.read_text().replace(" vendor pack/tool.py", " vendor pack/tool2.py"))
    with pytest.raises(StaleLock):
        flow.locked("mine", bench.layout)


def test_a_diff_is_from_the_targets_own_bytes(bench: Bench) -> None:
    bench.target.write(CORE, VENDORS)

    [visit], diffs = flow.diff("mine", bench.to, bench.layout)

    assert visit.exit == 6  # a deploy would refuse, and this is what it would refuse to overwrite
    assert diffs[visit.target] == (
        "diff --git target/pack/core.py plan/pack/core.py\n"
        + diffs[visit.target].splitlines(keepends=True)[1]
        + "--- target/pack/core.py\n+++ plan/pack/core.py\n@@ -1,2 +1 @@\n"
        "-V = 'base'\n-# the vendor's own line\n+V = 'ours'\n"
    )


def test_saved_deployed_and_verified_again_and_again(bench: Bench) -> None:
    """The edit loop, with what an editor does: change, add, delete."""
    edits: list[tuple[str, bytes | None]] = [
        (CORE, b"V = 'first'\n"),
        (CORE, b"V = 'again'\n"),  # of equal size, within the same second
        ("pack/fresh.py", b"NEW = 1\n"),
        ("pack/fresh.py", None),
        ("pack/tool.py", None),
    ]
    request = Request(verb=Verb.DEPLOY)
    took = []
    for path, data in edits:
        if data is None:
            (bench.repo / path).unlink()
        else:
            bench.write(path, data)
        began = time.monotonic()
        [visit] = flow.deploy("mine", bench.to, request, bench.layout, worktree=True)
        took.append(time.monotonic() - began)
        assert visit.exit == 0, visit
        assert visit.evidence is not None
        assert visit.evidence.verb is Verb.VERIFY
        assert bench.target.exists(path) == (data is not None)
        if data is not None:
            assert bench.target.read(path) == data
    assert bench.target.imported("pack.core") == "again"
    assert bench.git("rev-parse", "HEAD") == bench.head
    assert sorted(took)[len(took) // 2] < 10  # seconds, on a busy machine; the bench measures it


def test_the_worktree_cannot_be_locked_past_the_edits(bench: Bench) -> None:
    bench.write(CORE, b"V = 'not committed'\n")
    with pytest.raises(BadValues) as caught:
        flow.lock("mine", bench.layout)
    assert CORE in caught.value.why


def test_files_of_several_targets_are_not_mixed(bench: Bench) -> None:
    with pytest.raises(BadValues):
        flow.list_base("mine", f"{bench.to},{bench.to}", bench.layout)


def test_a_local_target_leaves_what_it_found_to_the_report(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    flow.lock("mine", bench.layout)
    [deployed] = flow.deploy("mine", bench.to, Request(verb=Verb.DEPLOY), bench.layout)
    steps = capfd.readouterr().err
    bench.target.write(CORE, b"V = 'edited'\n")
    [refused] = flow.deploy("mine", bench.to, Request(verb=Verb.DEPLOY), bench.layout)

    assert deployed.exit == 0
    assert "committed: " in steps
    assert "exit 0" not in steps
    assert refused.exit == 6
    assert CORE in report.visit_text(refused)
    assert CORE not in capfd.readouterr().err


def test_what_is_of_the_work_tree_says_so_and_is_not_handed_in(bench: Bench) -> None:
    flow.lock("mine", bench.layout)
    locked = bench.deploy()
    reporting.write("mine", layout=bench.layout)
    bench.write(CORE, b"V = 'not committed'\n")

    edited = bench.deploy(worktree=True)

    assert "equal to the commit" in report.visit_text(locked)
    assert "work tree" not in report.visit_text(locked)
    said = report.visit_text(edited)
    assert "verify: " in said.splitlines()[0]
    assert "of the work tree (not committed, not locked)" in said.splitlines()[0]
    assert "equal to the work tree (not committed, not locked)" in said
    assert "equal to the commit" not in said
    [told] = report.visits_json([edited])["targets"]
    assert told["worktree"] is True
    [path] = bench.layout.out_of("mine").glob("evidence*.json")
    assert json.loads(path.read_text())["worktree"] is True
    with pytest.raises(Differs, match="is of the work tree"):
        reporting.write("mine", layout=bench.layout)


def test_what_cannot_be_laid_here_is_deployed_elsewhere_by_its_own_name(bench: Bench) -> None:
    flow.lock("mine", bench.layout)

    with pytest.raises(BadValues, match="no base that can be laid") as caught:
        flow.reproduce("mine", bench.layout)

    assert "`./inv deploy -n mine -t ssh:ALIAS`" in caught.value.fix


def test_a_report_is_of_the_locked_plan_only(bench: Bench) -> None:
    flow.lock("mine", bench.layout)
    bench.deploy()
    bench.write(CORE, b"V = 'newer'\n")
    bench.head = bench.commit()
    bench.describe()
    flow.lock("mine", bench.layout)

    with pytest.raises(Differs, match="another plan"):
        reporting.write("mine", layout=bench.layout)
    assert bench.deploy().exit == 0
    found, _ = reporting.write("mine", layout=bench.layout)

    assert found["gates"][0]["verdict"] == "passed"


def test_a_restore_takes_the_proof_with_it(bench: Bench) -> None:
    flow.lock("mine", bench.layout)
    bench.deploy()
    before, _ = reporting.write("mine", layout=bench.layout)
    assert bench.run(Verb.RESTORE).exit == 0

    after, paths = reporting.write("mine", layout=bench.layout)

    assert f"{bench.to} was verified at 20" in before["known"]
    assert page.headline(after) == "Nothing was verified yet."
    assert "was restored at 20" in after["known"]
    assert "not verified since" in paths[1].read_text().split("## Gates")[0]
    shown = paths[2].read_text()
    assert "not verified since" in shown
    assert "every one classed" not in shown
    bench.deploy()
    again, _ = reporting.write("mine", layout=bench.layout)
    assert page.headline(again) == page.headline(before)


@pytest.mark.parametrize("loss", ["edited", "gone", "other bundles", "manifest"])
def test_the_locked_bundle_undoes_whatever_became_of_the_source(bench: Bench, loss: str) -> None:
    original = bench.target.read(CORE)
    flow.lock("mine", bench.layout)
    assert bench.deploy().exit == 0
    if loss in ("edited", "other bundles"):
        bench.write(CORE, b"V = 'not committed'\n")
    if loss == "other bundles":
        assert bench.deploy(worktree=True).exit == 0
        assert len(list(bench.layout.out.glob("mine-*.pyz"))) == 2
    if loss == "gone":
        shutil.rmtree(bench.repo)
    if loss == "manifest":
        bench.describe(ACCEPT.format(sha="0" * 64))

    undone = bench.run(Verb.RESTORE)

    assert (undone.exit, bench.target.read(CORE)) == (0, original)


def test_a_work_tree_is_verified_and_undone_without_a_lock(bench: Bench) -> None:
    original = bench.target.read(CORE)
    bench.write(CORE, b"V = 'not committed'\n")
    assert bench.deploy(worktree=True).exit == 0

    assert bench.run(Verb.VERIFY, worktree=True).exit == 0
    assert bench.run(Verb.RESTORE, worktree=True).exit == 0
    assert bench.target.read(CORE) == original


def test_a_lock_leaves_no_older_bundle_to_upload(bench: Bench) -> None:
    flow.lock("mine", bench.layout)
    bench.write(CORE, b"V = 'newer'\n")
    bench.head = bench.commit()
    bench.describe()
    flow.lock("mine", bench.layout)

    assert len(list(bench.layout.out.glob("mine-*.pyz"))) == 1
