"""Right files that are not what runs, things of the wrong kind, and callers that misspeak."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.agent.words import Exit
from tests.agent.target import BASE_FILES, Target, difference, pythons

TAG = sys.implementation.cache_tag
CORE = f"pack/__pycache__/core.{TAG}.pyc"


def test_a_package_beside_a_module_is_imported_in_its_place(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    (target.top / "pack/core").mkdir()
    assert target.states(bundle=bundle) == {}  # a folder without __init__ takes nobody's place

    target.write("pack/core/__init__.py", b"V = 'other'\n")
    assert target.imported("pack.core") == "other"  # the trap is real
    outcome = target.run(bundle, "verify")
    assert (outcome.code, outcome.states) == (10, {"pack/core.py": "shadowed"})
    assert "pack/core/ is imported in its place" in outcome.err


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"core.{TAG}-x86_64-linux-gnu.so", True),
        ("core.abi3.so", True),
        ("core.so", True),
        ("core.cpython-26-x86_64-linux-gnu.so", False),
        ("core.helper.so", False),
        ("score.so", False),
    ],
)
def test_an_extension_beside_a_module_is_imported_in_its_place(
    target: Target, name: str, found: bool
) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    target.write(f"pack/{name}", b"not even an extension")
    assert (target.imported("pack.core") == "ImportError") is found  # as the interpreter has it
    assert target.states(bundle=bundle) == ({"pack/core.py": "shadowed"} if found else {})


@pytest.mark.parametrize("place", [CORE, "pack/core.pyc"])
def test_a_folder_in_the_place_of_bytecode_refuses_before_anything_moves(
    target: Target, place: str
) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    (target.top / place).unlink(missing_ok=True)
    (target.top / place).mkdir()
    before = target.snapshot()

    assert target.run(bundle, "verify").states == {"pack/core.py": "stale pyc"}
    for verb in ("deploy", "restore"):
        outcome = target.run(bundle, verb)
        assert (outcome.code, f"{place}: " in outcome.err) == (6, True), verb
    assert difference(before, target.snapshot()) == {}

    (target.top / place).rmdir()
    assert target.run(bundle, "deploy").code == 0
    assert target.states(bundle=bundle) == {}


def test_a_link_in_the_place_of_bytecode_is_a_finding_not_an_error(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    (target.top / CORE).unlink()
    (target.top / CORE).symlink_to("nowhere")
    outcome = target.run(bundle, "verify")
    assert (outcome.code, outcome.states) == (10, {"pack/core.py": "stale pyc"})
    assert target.run(bundle, "deploy").code == 0
    assert target.states(bundle=bundle) == {}


def test_a_file_in_the_place_of_a_cache_folder_is_named(target: Target) -> None:
    target.write("pack/__pycache__", b"")
    outcome = target.run(target.usual(), "deploy")
    assert outcome.code == 6
    assert "pack/__pycache__" in outcome.err


def test_optimised_bytecode_is_another_one_than_was_proven(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    target.env["PYTHONOPTIMIZE"] = "1"
    outcome = target.run(bundle, "verify")
    assert outcome.code == 10
    assert "PYTHONOPTIMIZE" in outcome.err
    del target.env["PYTHONOPTIMIZE"]
    assert target.run(bundle, "verify").code == 0


@pytest.mark.parametrize("flag", ["--root", "--site", "--python", "--env-script", "--launch-dir"])
def test_an_empty_place_is_a_slip_and_never_this_machines_own_root(
    target: Target, flag: str
) -> None:
    bundle = target.usual()
    for words in ((flag, ""), (f"{flag}=",)):
        outcome = target.run(bundle, "check", *words)
        assert (outcome.code, outcome.evidence) == (2, {})
        assert f"{flag} needs a value" in outcome.err


@pytest.mark.parametrize(
    "words",
    [("--timeout", "nan"), ("--timeout", "-1"), ("--options", "[1]"), ("--options", "5")],
)
def test_a_number_or_an_object_that_is_none_is_a_usage_error(
    target: Target, words: tuple[str, ...]
) -> None:
    outcome = target.run(target.usual(), "check", *words)
    assert (outcome.code, outcome.evidence) == (2, {})
    assert "Traceback" not in outcome.err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("out", [">/dev/full", ">&-"])
def test_evidence_that_nobody_got_is_no_success_though_the_deploy_stands(
    target: Target, out: str
) -> None:
    bundle = target.usual()
    outcome = target.run(bundle, "deploy", wrap=("sh", "-c", f'"$@" {out}', "sh"))
    assert outcome.code == Exit.NEEDS_PERSON
    assert "the evidence was not written" in outcome.err
    assert target.states(bundle=bundle) == {}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("err", ["2>/dev/full", "2>&-"])
def test_steps_that_nobody_reads_change_no_exit_code(target: Target, err: str) -> None:
    bundle = target.usual()
    outcome = target.run(bundle, "deploy", wrap=("sh", "-c", f'"$@" {err}', "sh"))
    assert (outcome.code, outcome.evidence["outcome"]) == (0, "deployed")


def test_too_few_descriptors_are_no_wrong_base(target: Target) -> None:
    path = Path(target.usual().path)
    argv = ["sh", "-c", 'ulimit -n 12; exec "$@"', "sh", target.python, "-I", "-S", str(path)]
    argv += ["check", "--root", str(target.root)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert "is not the plan's base" not in done.stderr
    assert done.returncode in (3, 6)


def test_status_does_not_call_a_base_that_was_installed_again_deployed(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    assert target.run(bundle, "status").evidence["met"] == "deployed"
    target.write("pack/core.py", BASE_FILES["pack/core.py"])
    assert target.run(bundle, "status").evidence["met"] == "drifted"
    assert target.run(bundle, "deploy").code == 0
    target.write("pack/old.py", BASE_FILES["pack/old.py"])
    assert target.run(bundle, "status").evidence["met"] == "drifted"


def test_a_name_too_long_for_its_bytecode_is_refused_before_anything_moves(target: Target) -> None:
    before = target.snapshot()
    outcome = target.run(target.usual({f"pack/{'n' * 250}.py": b"N = 1\n"}), "deploy")
    assert outcome.code == 6
    assert "too long for its bytecode" in outcome.err
    assert difference(before, target.snapshot()) == {}


def test_an_interrupted_verify_says_so_and_needs_no_person(target: Target) -> None:
    (target.root / "env.sh").write_text('echo > "$READY"; sleep 60\n')
    bundle = target.usual()
    ready = target.root.parent / "ready"
    argv = [target.python, "-I", "-S", str(bundle.path), "verify", "--root", str(target.root)]
    env = {**os.environ, "READY": str(ready)}
    pipe = subprocess.PIPE
    agent = subprocess.Popen(
        [*argv, "--env-script", "/env.sh"], env=env, stdout=pipe, stderr=pipe, text=True
    )
    while not ready.exists():
        time.sleep(0.02)
    agent.send_signal(signal.SIGINT)
    out, err = agent.communicate(timeout=30)
    assert agent.returncode == 130
    assert json.loads(out)["outcome"] == "interrupted"
    assert "Traceback" not in err


FINDS_STALE = """\
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "pack.core":
            return importlib.util.spec_from_file_location(name, {stale!r})
sys.meta_path.insert(0, Finder)
"""
OTHER_PLACES = """\
import sys
from importlib.machinery import PathFinder
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "pack":
            spec = PathFinder.find_spec(name, path)
            spec.submodule_search_locations.insert(0, {folder!r})
            return spec
sys.meta_path.insert(0, Finder)
"""
OTHER_LOADER = """\
import sys
from importlib.machinery import FileFinder, SourceFileLoader
class Loader(SourceFileLoader):
    def get_code(self, name):
        if name == "pack.core":
            return compile("V = 'stale'", self.path, "exec")
        return super().get_code(name)
sys.path_hooks.insert(0, FileFinder.path_hook((Loader, [".py"])))
sys.path_importer_cache.clear()
"""
LOADED_BEFORE = """\
import sys, types
sys.modules["pack.core"] = module = types.ModuleType("pack.core")
module.V = "stale"
"""
WHOLE = "pack/__init__.py"


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (FINDS_STALE, {"pack/core.py": "/stale/core.py is imported in its place"}),
        (
            OTHER_PLACES,
            {
                WHOLE: "what lies below pack is looked for in ",
                "pack/core.py": "/stale/core.py is imported in its place",
            },
        ),
        (
            OTHER_LOADER,
            {
                WHOLE: "Loader of hook gives its code",
                "pack/core.py": "Loader of hook gives its code",
                "pack/fresh/__init__.py": "Loader of hook gives its code",
            },
        ),
        (LOADED_BEFORE, {"pack/core.py": "it was put into sys.modules"}),
    ],
)
def test_what_a_pth_does_to_one_module_is_seen(
    target: Target, tmp_path: Path, hook: str, said: dict[str, str]
) -> None:
    target.use(target.python, first=False)
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    stale = tmp_path / "stale/core.py"
    stale.parent.mkdir()
    stale.write_text("V = 'stale'\n")
    target.write("hook.py", hook.format(stale=str(stale), folder=str(stale.parent)).encode())
    assert target.states(bundle=bundle) == {}  # nobody loads it yet

    target.write("hook.pth", b"import hook\n")
    assert target.imported("pack.core") == "stale"  # the trap is real
    outcome = target.run(bundle, "verify")
    assert (outcome.code, outcome.states) == (10, dict.fromkeys(said, "shadowed"))
    whys = {row["path"]: row.get("why", "") for row in outcome.evidence["files"]}
    assert {path: why in whys[path] for path, why in said.items()} == dict.fromkeys(said, True)


def test_a_module_beside_a_folder_that_lost_its_init_shadows_all_below(target: Target) -> None:
    bundle = target.usual({"pack/deep/er/mod.py": b"V = 'ours'\n", "pack/core.py": b"V = 'ours'\n"})
    target.write("pack/deep/__init__.py", b"")
    assert target.run(bundle, "deploy").code == 0
    (target.top / "pack/deep/__init__.py").unlink()
    assert target.states(bundle=bundle) == {}  # a namespace folder below a namespace folder

    target.write("pack/deep.py", b"")
    assert target.imported("pack.deep.er.mod") == "ModuleNotFoundError"  # the trap is real
    outcome = target.run(bundle, "verify")
    assert (outcome.code, outcome.states) == (10, {"pack/deep/er/mod.py": "shadowed"})
    assert "pack.deep is " in outcome.err
    assert "/pack/deep.py, which is no package" in outcome.err


@pytest.mark.parametrize("version", sorted(set(pythons()) - {"2.7", "3.6", "3.7", "3.8", "3.9"}))
def test_no_alarm_for_what_an_import_finds_by_another_way(target: Target, version: str) -> None:
    """A linked site, namespace folders, a package that was imported at the start, and scripts."""
    files = {
        "pack/core.py": b"V = 'ours'\n",
        "pack/spaces/deep/mod.py": b"V = 'ours'\n",
        "pack/tools.v2/run-it.py": b"print('no import names this')\n",
        "pack/run-it.py": b"",
        "pack/__main__.py": b"",
        "pack/n\u00e4he.py": b"V = 'ours'\n",
        "single.py": b"V = 'ours'\n",
    }
    link = target.root / "linked"
    link.symlink_to(target.top)
    target.use(pythons()[version], first=False)
    hook = target.root.parent / "own/sitecustomize.py"
    hook.write_text(hook.read_text().replace(str(target.top), str(link)))
    target.write("start.pth", b"import pack.core\n")
    bundle = target.usual(files)
    assert target.run(bundle, "deploy").code == 0

    assert target.imported("pack.spaces.deep.mod") == "ours"
    for env in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        target.env.update(env)
        outcome = target.run(bundle, "verify")
        assert (outcome.code, outcome.states) == (0, {}), outcome.err


def giant(path: Path, size: int) -> None:
    """Let a file be as large as nobody can read it, at no cost: it is one hole."""
    with path.open("ab") as file:
        file.truncate(size)


def test_a_giant_is_told_by_its_size_and_never_read(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    before = target.snapshot()
    rest = {name: target.read(name) for name in ("pack/core.py", CORE)}
    giant(target.top / "pack/core.py", 1 << 40)
    giant(target.top / "pack/stranger.bin", 1 << 40)

    outcome = target.run(bundle, "verify", "--all")
    assert (outcome.code, outcome.states) == (10, {"pack/core.py": "changed"})
    found = next(r["found"] for r in outcome.evidence["files"] if r["path"] == "pack/core.py")
    assert found == {"type": f"file of {1 << 40} bytes"}
    audited = {row["path"]: row["why"] for row in outcome.evidence["audit"]["files"]}
    assert f"a giant of {1 << 40} bytes" in audited["pack/stranger.bin"]
    for options in ((), ("--replace-drift", "pack/core.py")):
        refused = target.run(bundle, "deploy", *options)
        assert (refused.code, f"found file of {1 << 40} bytes" in refused.err) == (6, True)

    (target.top / "pack/stranger.bin").unlink()
    os.truncate(target.top / "pack/core.py", len(rest["pack/core.py"]))
    giant(target.top / CORE, 200 << 30)
    outcome = target.run(bundle, "verify", "--all", "--recompile")
    assert (outcome.code, outcome.states) == (10, {"pack/core.py": "stale pyc"})
    assert target.run(bundle, "deploy").code == 6

    os.truncate(target.top / CORE, len(rest[CORE]))
    assert target.states(bundle=bundle) == {}
    assert before.keys() == target.snapshot().keys()


def test_a_giant_receipt_is_an_error_that_says_so(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    giant(target.top / ".dcu-bundle/receipt.json", 40 << 30)

    outcome = target.run(bundle, "verify")
    assert outcome.code == Exit.NEEDS_PERSON
    assert "the receipt of an earlier deploy cannot be read" in outcome.told
    assert "File too large" in outcome.err


def test_a_single_module_in_the_launch_folder_is_laid_to_that_folder(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    (target.root / "launch/pack.py").write_text("")

    outcome = target.run(bundle, "verify")
    assert outcome.code == 10
    why = outcome.evidence["origin"]["launch"]["why"]
    assert why == f"the current folder {target.root}/launch comes first on sys.path"
