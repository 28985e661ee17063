"""Deploy, verify, restore: what they promise on an ordinary target."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from deploy.agent.plan import PlannedFile
from tests.agent.target import (
    BASE_FILES,
    NEW_FILES,
    Bundle,
    Target,
    compile_all,
    difference,
    state,
)
from tests.table import Found, plants


def test_a_deploy_makes_the_plan_true_and_a_fresh_process_proves_it(target: Target) -> None:
    compile_all(target)
    bundle = target.usual()

    deployed = target.run(bundle, "deploy")
    verified = target.run(bundle, "verify")

    assert (deployed.code, deployed.evidence["outcome"]) == (0, "deployed")
    assert (verified.code, verified.evidence["outcome"]) == (0, "verified")
    assert verified.evidence["tree"] == deployed.evidence["tree"] == bundle.plan.tree
    assert verified.evidence["met"] == "deployed"
    assert target.imported("pack.core") == "ours"
    assert target.imported("pack.fresh", "SEEN") == "ours"
    for module in ("pack.old", "pack.lonely"):
        assert target.imported(module) == "ModuleNotFoundError"


def test_an_unchanged_second_deploy_writes_nothing(target: Target) -> None:
    bundle = target.usual()
    target.run(bundle, "deploy")
    stamps = all_stamps(target.root)

    second = target.run(bundle, "deploy")
    checked = target.run(bundle, "check")

    assert (second.code, second.evidence["outcome"]) == (0, "nothing to do")
    assert checked.code == 0
    assert all_stamps(target.root) == stamps


def all_stamps(root: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for folder, _, names in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            info = os.lstat(path)
            found[path] = (info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
    return found


def test_check_and_verify_change_nothing_on_a_target_that_needs_work(target: Target) -> None:
    bundle = target.usual()
    stamps = all_stamps(target.root)

    checked, verified = target.run(bundle, "check"), target.run(bundle, "verify")

    assert (checked.code, checked.evidence["outcome"]) == (10, "would change")
    assert checked.evidence["changes"]["drop"] == ["pack/lonely/__init__.py", "pack/old.py"]
    assert verified.code == 10
    assert verified.states == {
        "pack/core.py": "still base",
        "pack/fresh/__init__.py": "missing",
        "pack/lonely/__init__.py": "left over",
        "pack/old.py": "left over",
        "pack/table.json": "still base",
    }
    assert all_stamps(target.root) == stamps


def test_restore_gives_back_inode_bytes_mode_owner_and_time(target: Target) -> None:
    target.write("pack/core.py", BASE_FILES["pack/core.py"], mode=0o664)
    os.chown(target.top / "pack/core.py", 1234, 2345)
    os.utime(target.top / "pack/table.json", ns=(1, 987_654_321))
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()

    assert target.run(bundle, "deploy").code == 0
    assert os.stat(target.top / "pack/core.py").st_uid == 1234
    restored = target.run(bundle, "restore")

    assert (restored.code, restored.evidence["outcome"]) == (0, "restored")
    assert difference(before, target.snapshot()) == {}
    assert target.run(bundle, "restore").evidence["outcome"] == "nothing to restore"


def test_a_second_plan_keeps_the_first_originals_and_gives_back_what_it_leaves(
    target: Target,
) -> None:
    before = target.snapshot()
    first = target.usual()
    files: dict[str, bytes | None] = {"pack/core.py": b"V = 'two'\n", "pack/tool.py": b"T = 2\n"}
    second = target.usual(files)

    assert target.run(first, "deploy").code == 0
    met = target.run(second, "check").evidence["met"]
    assert target.run(second, "deploy").code == 0
    assert target.run(second, "verify").code == 0

    assert met == "other plan"
    assert target.read("pack/old.py") == BASE_FILES["pack/old.py"]
    assert not target.exists("pack/fresh")
    assert target.run(second, "restore").code == 0
    assert difference(before, target.snapshot()) == {}


def test_one_foreign_file_refuses_everything_and_lists_all_with_three_digests(
    target: Target,
) -> None:
    target.write("pack/core.py", b"edited by hand\n")
    target.write("pack/old.py", b"this one too\n")
    stamps = all_stamps(target.root)
    bundle = target.usual()

    outcome = target.run(bundle, "deploy")

    assert (outcome.code, outcome.evidence["outcome"]) == (6, "refused")
    conflicts = outcome.evidence["conflicts"]
    assert [c["path"] for c in conflicts] == ["pack/core.py", "pack/old.py"]
    assert conflicts[0]["assumed"] == [state(BASE_FILES["pack/core.py"]).to_json()]
    assert conflicts[0]["promised"] == state(NEW_FILES["pack/core.py"]).to_json()
    assert conflicts[0]["found"] == state(b"edited by hand\n").to_json()
    for path in ("pack/core.py", "pack/old.py"):
        assert path in outcome.err
    assert all_stamps(target.root) == stamps


def test_restore_refuses_when_somebody_edited_a_deployed_file(target: Target) -> None:
    bundle = target.usual()
    target.run(bundle, "deploy")
    target.write("pack/core.py", b"edited since\n")
    before = target.snapshot()

    outcome = target.run(bundle, "restore")

    assert outcome.code == 6
    assert "pack/core.py" in outcome.err
    assert "1 file is neither" in outcome.err
    assert target.snapshot() == before
    assert target.run(bundle, "status").evidence["met"] == "drifted"
    # The way that is named leads there: a restore itself has no such flag.
    assert "`deploy --replace-drift FILE`" in outcome.err.split("fix:")[1]
    assert target.run(bundle, "deploy", "--replace-drift", "pack/core.py").code == 0
    assert target.run(bundle, "restore").code == 0
    assert (target.top / "pack/core.py").read_bytes() == b"edited since\n"


def test_a_mode_only_change_is_made_on_a_new_inode_so_a_package_cache_stays_clean(
    target: Target,
) -> None:
    cache = target.root.parent / "cache-entry.py"
    os.link(target.top / "pack/tool.py", cache)
    tool = BASE_FILES["pack/tool.py"]
    entry = PlannedFile(
        path="pack/tool.py", role="module", want=state(tool, "0755"), assume=(state(tool),)
    )
    bundle = target.bundle(target.plan(entry), [tool])

    assert target.run(bundle, "deploy").code == 0

    assert os.stat(target.top / "pack/tool.py").st_mode & 0o777 == 0o755
    assert os.stat(cache).st_mode & 0o777 == 0o644
    assert target.run(bundle, "verify").code == 0
    os.chmod(target.top / "pack/tool.py", 0o644)
    assert target.run(bundle, "verify").states == {"pack/tool.py": "wrong mode"}


@plants("hard links into a package cache")
def test_a_hard_linked_original_is_never_written_through(target: Target, found: Found) -> None:
    cache = target.root.parent / "cache-entry.py"
    os.link(target.top / "pack/core.py", cache)
    bundle = target.usual()

    target.run(bundle, "deploy")
    target.run(bundle, "restore")

    assert cache.read_bytes() == BASE_FILES["pack/core.py"]
    assert os.stat(cache).st_ino == os.stat(target.top / "pack/core.py").st_ino
    found("nothing to find: the cache keeps its bytes and inode")


def test_a_planned_link_is_made_and_taken_back(target: Target) -> None:
    from deploy.agent.plan import ABSENT, State

    entry = PlannedFile(
        path="pack/alias.json",
        role="data",
        want=State(type="link", link="table.json"),
        assume=(ABSENT,),
    )
    bundle = target.bundle(target.plan(entry), [])

    assert target.run(bundle, "deploy").code == 0
    assert os.readlink(target.top / "pack/alias.json") == "table.json"
    assert target.run(bundle, "verify").code == 0
    assert target.run(bundle, "restore").code == 0
    assert not target.exists("pack/alias.json")


def test_evidence_of_two_equal_targets_differs_below_incidental_only(tmp_path: Path) -> None:
    said = []
    for name in ("one", "two"):
        target = Target(tmp_path / name / "root")
        target.make(BASE_FILES)
        bundle = target.usual()
        target.run(bundle, "deploy")
        evidence = target.run(bundle, "verify").evidence
        del evidence["incidental"]
        said.append(json.dumps(evidence, sort_keys=True).replace(f"/{name}/", "/"))
    assert said[0] == said[1]


@pytest.mark.parametrize("flaw", ["flipped", "missing"])
def test_a_wrong_blob_stops_the_deploy_before_anything_is_written(
    target: Target, flaw: str
) -> None:
    plan = target.usual().plan
    wanted = [entry.want.sha256 for entry in plan.files if entry.want.type == "file"]
    good = {state(data).sha256: data for data in NEW_FILES.values() if data is not None}
    for sha in wanted:
        contents = dict(good)
        if flaw == "flipped":
            contents[sha] = bytes([good[sha][0] ^ 1]) + good[sha][1:]
        else:
            del contents[sha]
        bundle = Bundle.write(target.root.parent / "bad.pyz", plan, contents)
        stamps = all_stamps(target.root)

        outcome = target.run(bundle, "deploy")

        assert (outcome.code, outcome.evidence["outcome"]) == (4, "damaged")
        assert sha in outcome.err
        assert all_stamps(target.root) == stamps


def test_by_hand_the_last_line_says_how_it_ended(target: Target) -> None:
    bundle = target.usual()

    def last(verb: str) -> str:
        return target.run(bundle, verb).err.splitlines()[-1]

    count = len(NEW_FILES)
    assert re.fullmatch(r"check: would change, .*\d to drop, \d to put; exit 10", last("check"))
    assert last("deploy") == f"deploy: deployed, {count} files; exit 0"
    assert last("verify") == f"verify: verified, {count} files; exit 0"
    assert last("status") == "status: answered, met: deployed; exit 0"
    target.write("pack/core.py", b"edited\n")
    assert last("verify") == f"verify: differs, 1 of {count} files not as planned; exit 10"
    target.write("pack/core.py", NEW_FILES["pack/core.py"] or b"")
    assert last("restore") == f"restore: restored, {count} files; exit 0"
    assert last("restore") == "restore: nothing to restore; exit 0"


def test_an_error_by_hand_ends_with_its_mend(target: Target) -> None:
    target.write("pack/core.py", b"edited\n")

    last = target.run(target.usual(), "deploy").err.splitlines()[-1]

    assert last.startswith("  fix: ")


def test_who_prints_the_evidence_is_told_the_steps_only(target: Target) -> None:
    bundle = target.usual()

    deployed = target.run(bundle, "deploy", "--steps-only")
    target.write("pack/core.py", b"edited\n")
    refused = target.run(bundle, "deploy", "--steps-only")
    verified = target.run(bundle, "verify", "--steps-only")
    by_hand = target.run(bundle, "verify")

    assert re.fullmatch(r"committed: \d+ steps\n", deployed.err)
    assert (refused.code, refused.err) == (6, "")
    assert refused.evidence["error"]["what"]
    assert (verified.code, verified.err) == (10, "")
    assert "pack/core.py" in by_hand.err
    assert by_hand.evidence["files"] == verified.evidence["files"]


def test_an_option_of_a_later_carrier_is_no_error(target: Target) -> None:
    """A locked bundle stays what it is while the checkout beside it moves on."""
    done = target.run(target.usual(), "status", "--options", '{"of-a-later-day": true}')

    assert (done.code, done.evidence["outcome"]) == (0, "answered")


def test_bytecode_that_is_not_written_is_no_line_of_every_call(target: Target) -> None:
    bundle = target.usual()
    target.run(bundle, "deploy")
    target.env.update(PYTHONDONTWRITEBYTECODE="1")

    verified = target.run(bundle, "verify")

    assert [trap["kind"] for trap in verified.evidence["traps"]] == ["no bytecode written"]
    assert len(verified.err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv", [("--help",), ("help",), ("verify", "--help"), ("deploy", "--root", "/", "-h")]
)
def test_help_is_no_error_wherever_it_stands(target: Target, argv: tuple[str, ...]) -> None:
    call = [target.python, "-I", "-S", str(target.usual().path), *argv]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python3 BUNDLE check|deploy")
