"""What a target keeps of an earlier deploy, spoilt: nobody may be told that all is well."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.agent.target import BASE_FILES, Bundle, Target, compile_all, difference, planned, pythons
from tests.agent.test_agent_killed import needs_strace
from tests.table import Found, plants

HOME = ".dcu-bundle"
Spoil = Callable[[dict[str, Any]], object]


def kept(target: Target, path: str) -> str:
    """Return where the original of `path` is kept, relative to the site."""
    receipt = json.loads(target.read(f"{HOME}/receipt.json"))
    return f"{HOME}/kept/{receipt['originals'][path]['kept']}"


def upgraded(target: Target) -> Bundle:
    """Install version 1.1 of the base over whatever is there; return a bundle for it."""
    target.write("pack/core.py", b"V = 'more'\n")
    for path in ("pack/old.py", "pack/lonely/__init__.py", "pack/table.json"):
        target.write(path, BASE_FILES[path])
    shutil.rmtree(target.top / "pack-1.0.dist-info")
    text = b"Metadata-Version: 2.1\nName: pack\nVersion: 1.1\n"
    target.write("pack-1.1.dist-info/METADATA", text)
    files = (
        planned("pack/core.py", b"V = 'ours'\n", assume=[b"V = 'more'\n"]),
        planned("pack/old.py", None),
        planned("pack/fresh/__init__.py", b"from pack.core import V as SEEN\n"),
    )
    plan = target.plan(*files, requires={"pack": "1.1"})
    return target.bundle(plan, [b"V = 'ours'\n", b"from pack.core import V as SEEN\n"])


def test_an_original_that_was_changed_in_its_place_is_not_given_back(target: Target) -> None:
    """A package cache holds the same inode: who edits there edits what was kept."""
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    (target.top / kept(target, "pack/core.py")).write_bytes(b"V = 'evil'\n")
    before = target.snapshot()

    outcome = target.run(bundle, "restore")

    assert outcome.code == 6
    assert "pack/core.py" in outcome.err
    assert "pack/old.py" not in outcome.err
    assert difference(before, target.snapshot()) == {}


def test_lost_originals_are_named_and_a_new_base_opens_the_way_back(target: Target) -> None:
    before = target.snapshot(inodes=False)
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    shutil.rmtree(target.top / HOME / "kept")

    outcome = target.run(bundle, "restore")
    assert outcome.code == 6
    assert "4 original(s) cannot be given back" in outcome.err

    for path in ("pack/core.py", "pack/old.py", "pack/lonely/__init__.py", "pack/table.json"):
        target.write(path, BASE_FILES[path])
    assert target.run(bundle, "deploy").code == 0
    assert target.run(bundle, "restore").code == 0
    after = target.snapshot(inodes=False)
    assert {path: row[3] for path, row in before.items() if len(row) > 3} == {
        path: row[3] for path, row in after.items() if len(row) > 3
    }


def test_bytecode_that_was_kept_and_is_spoilt_is_left_to_python(target: Target) -> None:
    compile_all(target)
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    receipt = json.loads(target.read(f"{HOME}/receipt.json"))
    pyc = next(path for path in receipt["originals"] if "core." in path and path.endswith(".pyc"))
    (target.top / kept(target, pyc)).write_bytes(b"junk")
    assert target.run(bundle, "restore").code == 0
    assert not target.exists(pyc)
    assert target.read("pack/core.py") == BASE_FILES["pack/core.py"]


def test_a_restore_after_a_new_base_gives_back_that_one(target: Target) -> None:
    compile_all(target)
    assert target.run(target.usual(), "deploy").code == 0
    second = upgraded(target)
    before = {path: target.read(path) for path in ("pack/core.py", "pack/old.py")}

    assert target.run(second, "deploy").code == 0
    assert target.run(second, "verify").code == 0
    assert target.run(second, "restore").code == 0

    assert {path: target.read(path) for path in before} == before
    assert target.imported("pack.core") == "more"
    assert not target.exists(HOME)


SPOILT: dict[str, Spoil] = {
    "no originals": lambda raw: raw.pop("originals"),
    "originals of another shape": lambda raw: raw.update(originals=[]),
    "an original gone": lambda raw: raw["originals"].pop("pack/core.py"),
    "an entry without a state": lambda raw: raw["originals"].update({"pack/core.py": {"kept": ""}}),
    "another serial": lambda raw: raw.update(serial="x"),
    "a file less": lambda raw: raw["files"].pop("pack/core.py"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_receipt_that_was_edited_is_not_acted_on(target: Target, how: str) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    raw = json.loads(target.read(f"{HOME}/receipt.json"))
    SPOILT[how](raw)
    target.write(f"{HOME}/receipt.json", json.dumps(raw).encode())
    before = target.snapshot()
    for verb in ("verify", "deploy", "restore", "status"):
        outcome = target.run(bundle, verb)
        assert (outcome.code, "receipt" in outcome.err) == (8, True), verb
    assert difference(before, target.snapshot()) == {}


@pytest.mark.parametrize(
    "text", ["\n", "hello\n", "[1]\n", "{}\n", '{"steps": 1}\n', "[" * 100_000 + "\n"]
)
def test_a_journal_that_cannot_be_read_needs_a_person(target: Target, text: str) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    target.write(f"{HOME}/journal", text.encode())
    before = target.snapshot()
    for verb in ("deploy", "restore"):
        outcome = target.run(bundle, verb)
        assert (outcome.code, outcome.evidence["outcome"]) == (8, "needs a person"), verb
        assert f"{HOME}/journal" in outcome.err
    assert difference(before, target.snapshot()) == {}


# --- a journal of another site


def copied(target: Target, kill: str, *, whole: bool, verb: str = "deploy") -> Target:
    """Return a second site; its records are those of the first, whose call died at `kill`."""
    other = Target(target.root.parent / "other")
    other.make(BASE_FILES)
    bundle = target.usual()
    if verb == "restore":
        for site in (target, other):
            assert site.run(bundle, "deploy").code == 0
    wrap = ("strace", "-o", "/dev/null", *kill.split())
    assert target.run(bundle, verb, wrap=wrap).code == -signal.SIGKILL
    if whole:
        shutil.rmtree(other.top / HOME, ignore_errors=True)
        shutil.copytree(target.top / HOME, other.top / HOME)
    else:
        (other.top / HOME).mkdir(exist_ok=True)
        shutil.copy(target.top / HOME / "journal", other.top / HOME / "journal")
    return other


COMMITTED = "-e trace=renameat -e inject=renameat:signal=KILL:when=2"
UNDONE = (  # the line that says so is there, and nothing was taken back yet
    "-e trace=renameat,fsync -e inject=renameat:error=EIO:when=5 -e inject=fsync:signal=KILL:when=4"
)


@plants("a journal copied from another site")
@needs_strace
@pytest.mark.parametrize("whole", [False, True], ids=["journal", "all records"])
@pytest.mark.parametrize(
    ("verb", "kill"), [("deploy", COMMITTED), ("restore", COMMITTED), ("deploy", UNDONE)]
)
def test_a_journal_that_was_written_elsewhere_is_not_acted_on(
    target: Target, verb: str, kill: str, whole: bool, found: Found
) -> None:
    other = copied(target, kill, whole=whole, verb=verb)
    before = other.snapshot()

    bundle = target.usual()
    for again in ("deploy", "restore"):
        outcome = other.run(bundle, again)
        assert outcome.code == 8
        assert f"{HOME}/journal tells of files that were staged here" in outcome.err
        assert difference(before, other.snapshot()) == {}
    assert other.run(bundle, "verify").code == 10
    found(f"deploy, restore: {outcome.told}")

    # Where it belongs, the next call mends as ever; and so it does in a copy of the whole site.
    moved = Target(target.root.parent / "moved")
    shutil.copytree(target.root, moved.root, symlinks=True)
    moved.use(moved.python)
    for site in (target, moved):
        assert site.run(bundle, "restore").code == 0
        assert not site.exists(HOME)
        assert site.read("pack/core.py") == BASE_FILES["pack/core.py"]


def test_a_journal_that_was_not_committed_takes_nothing_from_another_site(target: Target) -> None:
    kill = "-e trace=syncfs -e inject=syncfs:signal=KILL:when=1"
    other = copied(target, kill, whole=True)
    assert other.run(target.usual(), "deploy").code == 0
    assert other.run(target.usual(), "restore").code == 0
    assert not other.exists(HOME)
    assert {p: other.read(p) for p in BASE_FILES} == BASE_FILES


def test_a_journal_whose_staged_files_have_strange_names_needs_a_person(target: Target) -> None:
    kill = "-e trace=syncfs -e inject=syncfs:signal=KILL:when=1"
    bundle = target.usual()
    wrap = ("strace", "-o", "/dev/null", *kill.split())
    assert target.run(bundle, "deploy", wrap=wrap).code == -signal.SIGKILL
    raw = json.loads(target.read(f"{HOME}/journal"))
    raw["steps"][0][2] = "pack/tool.py"
    target.write(f"{HOME}/journal", json.dumps(raw).encode() + b"\n")

    outcome = target.run(bundle, "deploy")

    assert outcome.code == 8
    assert "pack/tool.py is no name of a staged file" in outcome.err
    assert target.read("pack/tool.py") == BASE_FILES["pack/tool.py"]


def test_an_interpreter_that_speaks_last_is_understood(target: Target) -> None:
    launcher = target.root / "usr/bin/python3"
    launcher.write_text(launcher.read_text().replace("exec ", "") + "echo bye\n")
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    assert target.run(bundle, "verify").code == 0


def test_an_interpreter_whose_answer_is_torn_is_unfit(target: Target) -> None:
    launcher = target.root / "usr/bin/python3"
    launcher.write_text("#!/bin/sh\nprintf '\\n\\000dcu-bundle:origin\\000\\n[{'\n")
    outcome = target.run(target.usual(), "check")
    assert (outcome.code, outcome.evidence["outcome"]) == (3, "unfit")


def test_an_interpreter_that_is_another_one_without_an_environment_is_unfit(
    target: Target,
) -> None:
    others = [python for version, python in pythons().items() if version in ("3.10", "3.12")]
    if not others:
        pytest.skip("there is no second Python >= 3.10 on this machine")
    launcher = target.root / "usr/bin/python3"
    text = launcher.read_text()
    branch = text.replace(target.python, others[0])
    launcher.write_text(f'#!/bin/sh\nif [ -n "$HOME" ]; then\n{branch}else\n{text}fi\n')
    bundle = target.usual()
    before = target.snapshot()
    outcome = target.run(bundle, "deploy")
    assert outcome.code == 3
    assert "not the same one every time" in outcome.err
    assert difference(before, target.snapshot()) == {}


def test_env_script_changes_no_folder_and_no_words(target: Target) -> None:
    """The service enters its folder after the script: a shadow there must not be overlooked."""
    (target.root / "env.sh").write_text("cd /\nset -- nothing\n")
    bundle = target.usual()
    assert target.run(bundle, "deploy", "--env-script", "/env.sh").code == 0
    assert target.run(bundle, "verify", "--env-script", "/env.sh").code == 0
    (target.root / "launch/pack").mkdir()
    (target.root / "launch/pack/__init__.py").write_text("")
    outcome = target.run(bundle, "verify", "--env-script", "/env.sh")
    assert outcome.states == {"pack/__init__.py": "shadowed"}


def test_what_env_script_leaves_in_the_empty_folder_does_no_harm(target: Target) -> None:
    (target.root / "env.sh").write_text('mkdir -p a; echo x > a/env.log; pwd > "$OUT"\n')
    out = target.root.parent / "where"
    target.env["OUT"] = str(out)
    shutil.rmtree(target.root / "launch")
    bundle = target.usual()
    assert target.run(bundle, "deploy", "--env-script", "/env.sh").code == 0
    assert not os.path.exists(out.read_text().strip())
