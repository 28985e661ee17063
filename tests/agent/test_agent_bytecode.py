"""Bytecode and import origin: every way in which right files are not what runs."""

from __future__ import annotations

import marshal
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.agent.pyc import MARK, WORK, Bytecode, understood
from deploy.agent.tree import TreeReader
from deploy.agent.words import Exit, digest
from tests.agent.target import (
    BASE_FILES,
    SITE,
    Target,
    compile_all,
    difference,
    planned,
    pythons,
    state,
)

TAG = sys.implementation.cache_tag
CORE = f"pack/__pycache__/core.{TAG}.pyc"


@pytest.fixture
def deployed(target: Target) -> Target:
    target.bundled = target.usual()
    assert target.run(target.bundled, "deploy").code == 0
    assert target.states() == {}
    return target


def test_stale_bytecode_of_equal_size_and_time_is_gone_after_a_deploy(target: Target) -> None:
    new = b"V = 'bace'\n"  # as long as the base's
    compile_all(target)
    stamp = os.stat(target.top / "pack/core.py")
    bundle = target.usual({"pack/core.py": new})

    assert target.run(bundle, "deploy").code == 0
    os.utime(target.top / "pack/core.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

    assert target.imported("pack.core") == "bace"


def test_bytecode_of_the_old_source_with_equal_size_and_time_is_found_stale(
    deployed: Target,
) -> None:
    source = deployed.top / "pack/core.py"
    good = source.read_bytes()
    source.write_bytes(b"V = 'old!'\n")
    os.utime(source, ns=(10**18, 10**18))
    py_compile.compile(
        str(source), str(deployed.top / CORE), doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
    )  # fmt: skip
    source.write_bytes(good)
    os.utime(source, ns=(10**18, 10**18))

    assert deployed.imported("pack.core") == "old!"  # the trap is real
    assert deployed.states() == {"pack/core.py": "stale pyc"}
    assert deployed.run(deployed.bundled, "deploy").code == 0
    assert deployed.imported("pack.core") == "ours"
    assert deployed.states() == {}


def test_a_right_header_with_a_wrong_body_is_found(deployed: Target) -> None:
    header = deployed.read(CORE)[:16]
    code = compile("V = 'else'\n", str(deployed.top / "pack/core.py"), "exec")
    (deployed.top / CORE).write_bytes(header + marshal.dumps(code))

    assert deployed.imported("pack.core") == "else"
    assert deployed.states() == {"pack/core.py": "wrong pyc body"}


def test_the_same_code_marshalled_otherwise_is_no_fault(deployed: Target) -> None:
    header, source = deployed.read(CORE)[:16], deployed.read("pack/core.py")
    code = compile(source, str(deployed.top / "pack/core.py"), "exec", dont_inherit=True)
    body = marshal.dumps(code, 4)
    assert body != deployed.read(CORE)[16:]
    (deployed.top / CORE).write_bytes(header + body)

    outcome = deployed.run(deployed.bundled, "verify")

    assert outcome.code == 0
    proofs = {row["path"]: row.get("proof") for row in outcome.evidence["files"]}
    assert (proofs["pack/core.py"], proofs["pack/fresh/__init__.py"]) == ("compiled", "receipt")


@pytest.mark.parametrize("body", [b"", b"\x00", b"garbage"])
def test_a_torn_body_is_a_wrong_body(deployed: Target, body: bytes) -> None:
    (deployed.top / CORE).write_bytes(deployed.read(CORE)[:16] + body)
    assert deployed.states() == {"pack/core.py": "wrong pyc body"}


def test_a_forged_receipt_does_not_survive_recompiling(deployed: Target) -> None:
    """The receipt is a short cut, not an authority: --recompile does without it."""
    header = deployed.read(CORE)[:16]
    code = compile("V = 'else'\n", str(deployed.top / "pack/core.py"), "exec")
    forged = header + marshal.dumps(code, 2)
    (deployed.top / CORE).write_bytes(forged)
    receipt = deployed.top / ".dcu-bundle/receipt.json"
    record = receipt.read_text()
    import json

    raw = json.loads(record)
    raw["pycs"][CORE]["sha256"] = state(forged).sha256
    del raw["seal"]
    receipt.write_text(json.dumps({**raw, "seal": digest(raw)}))

    assert deployed.states() == {}
    assert deployed.states("--recompile") == {"pack/core.py": "wrong pyc body"}


def test_missing_bytecode_is_not_compiled(deployed: Target) -> None:
    (deployed.top / CORE).unlink()
    assert deployed.states() == {"pack/core.py": "not compiled"}
    assert deployed.run(deployed.bundled, "deploy").code == 0
    assert deployed.states() == {}


def test_a_changed_byte_with_size_and_time_kept_is_found(deployed: Target) -> None:
    path = deployed.top / "pack/table.json"
    stamp = os.stat(path)
    path.write_bytes(b'{"a": 2}\n')
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert deployed.states() == {"pack/table.json": "changed"}


def test_bytecode_of_every_interpreter_and_beside_the_source_goes_with_its_module(
    target: Target,
) -> None:
    cache = "pack/__pycache__"
    stale = [f"{cache}/core.cpython-38.pyc", f"{cache}/core.cpython-312.opt-2.pyc", "pack/core.pyc"]
    gone = [f"{cache}/old.pypy39.pyc", "pack/old.pyc"]
    neighbours = [f"{cache}/core.x.cpython-38.pyc", f"{cache}/corel.cpython-38.pyc", "pack/cor.pyc"]
    for path in stale + gone + neighbours:
        target.write(path, b"bytecode")
    before = target.snapshot()
    bundle = target.usual()

    assert target.run(bundle, "deploy").code == 0

    assert [path for path in stale + gone if target.exists(path)] == []
    assert all(target.exists(path) for path in neighbours)
    target.write("pack/old.pyc", b"x")
    assert target.states(bundle=bundle) == {"pack/old.py": "left over"}
    target.write("pack/core.pyc", b"x")
    (target.top / "pack/old.pyc").unlink()
    assert target.states(bundle=bundle) == {"pack/core.py": "stale pyc"}
    (target.top / "pack/core.pyc").unlink()
    assert target.run(bundle, "restore").code == 0
    assert target.snapshot() == before


def test_a_bare_pyc_of_a_deleted_module_imports_before_and_not_after(target: Target) -> None:
    compile_all(target)
    py_compile.compile(str(target.top / "pack/old.py"), str(target.top / "pack/old.pyc"))
    os.unlink(target.top / "pack/old.py")
    entry = target.bundle_of("pack/old.py", None, assume=[BASE_FILES["pack/old.py"], None])
    assert target.imported("pack.old", "OLD") == "1"

    assert target.states(bundle=entry) == {"pack/old.py": "left over"}
    assert target.run(entry, "deploy").code == 0

    assert target.imported("pack.old", "OLD") == "ModuleNotFoundError"
    assert target.states(bundle=entry) == {}


BROKEN = {
    "nul.py": (b"V=1\n\0\0", "line"),
    "allnul.py": (b"\0" * 20, "line"),
    "cut.py": (b"if x:", "line 1"),
    "utf16.py": ("V=1\n".encode("utf-16"), "line"),
    "late.py": (b"V=1\nW=2\nfor\n", "line 3"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_damaged_source_is_refused_with_file_and_line_and_nothing_changes(
    target: Target, name: str
) -> None:
    data, where = BROKEN[name]
    before = target.snapshot()
    bundle = target.usual({"pack/core.py": b"V = 'ours'\n", f"pack/{name}": data})

    outcome = target.run(bundle, "deploy")

    assert outcome.code == 6
    assert f"pack/{name}" in outcome.err
    assert where in outcome.err
    assert target.snapshot() == before


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfV=1\n", b"", b"V = '\xe4\xb8\xad'\n"])
def test_a_byte_order_mark_an_empty_file_and_utf_8_are_valid(target: Target, data: bytes) -> None:
    bundle = target.usual({"pack/fine.py": data})
    assert target.run(bundle, "deploy").code == 0
    assert target.read("pack/fine.py") == data
    assert target.states(bundle=bundle) == {}


def test_source_that_is_not_utf_8_is_refused_by_name_though_it_compiles(target: Target) -> None:
    data = b"# \xd6\xd0\nV=1\n"
    compile(data, "gbk.py", "exec")  # the trap: importing works, running it does not
    before = target.snapshot()

    outcome = target.run(target.usual({"pack/gbk.py": data}), "deploy")

    assert outcome.code == 6
    assert "pack/gbk.py" in outcome.err
    assert "UTF-8" in outcome.err
    assert target.snapshot() == before


def test_a_declared_encoding_is_not_refused(target: Target) -> None:
    data = "# -*- coding: gbk -*-\nV = '中'\n".encode("gbk")
    assert target.run(target.usual({"pack/gbk.py": data}), "deploy").code == 0


def test_the_services_own_interpreter_judges_the_syntax(target: Target) -> None:
    old, new = pythons().get("3.10"), pythons().get("3.12")
    if not (old and new):
        pytest.skip("needs a Python 3.10 and a Python 3.12")
    bundle = target.usual({"pack/typed.py": b"type A = int\n"})
    before = target.snapshot()

    target.use(old)
    refused = target.run(bundle, "deploy")
    after = target.snapshot()
    target.use(new)
    accepted = target.run(bundle, "deploy")

    assert refused.code == 6
    assert "pack/typed.py" in refused.err
    assert {p: r for p, r in after.items() if "bin" not in p} == {
        p: r for p, r in before.items() if "bin" not in p
    }
    assert accepted.code == 0
    assert accepted.evidence["python"]["version"].startswith("3.12")
    assert accepted.evidence["python"]["path"] == "/usr/bin/python3"


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_agent_and_service_may_run_any_python_from_3_10(target: Target, version: str) -> None:
    path = pythons().get(version)
    if not path:
        pytest.skip(f"no Python {version} on this machine")
    before = target.snapshot()
    target.use(path)
    bundle = target.usual()
    launcher = target.snapshot()

    for verb in ("check", "deploy", "verify", "status", "facts", "restore"):
        outcome = target.run(bundle, verb, python=path)
        assert outcome.code == (10 if verb == "check" else 0), (verb, outcome.err)
        assert outcome.states == {}

    assert target.snapshot() == launcher
    assert before.keys() == launcher.keys()


_INNER = "import sys; sys.modules['_frozen_importlib_external'] = None\n"


@pytest.mark.parametrize("without", ["", _INNER], ids=["", "without what is the interpreter's own"])
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_a_pyc_begins_as_the_interpreter_itself_would_begin_it(
    tmp_path: Path, version: str, without: str
) -> None:
    python = pythons().get(version) or pytest.skip(f"no Python {version} on this machine")
    source, name = b"V = '\xe4\xb8\xad'\n", tmp_path / "m.py"
    name.write_bytes(source)
    own = "import sys, py_compile as p; p.compile(sys.argv[1], 'm.pyc', invalidation_mode=p."
    own += "PycInvalidationMode.CHECKED_HASH)"
    subprocess.run([python, "-c", own, name], cwd=tmp_path, check=True, timeout=60)
    place = str(name).encode()
    job = b"1\nmake %d %d 0\n%s%s" % (len(place), len(source), place, source)

    argv = [python, "-S", "-s", "-c", f"{without}MARK = {MARK!r}\n{WORK}"]
    done = subprocess.run(argv, input=job, capture_output=True, check=True, timeout=60)

    info, results = understood(done.stdout.removeprefix(MARK), 1)
    assert info["version"].startswith(f"{version}.")
    assert [(verdict, pyc[:16]) for verdict, pyc in results] == [
        ("made", (tmp_path / "m.pyc").read_bytes()[:16])
    ]


@pytest.mark.parametrize(
    "torn",
    [
        b"", b"cpython-311 3.11.7\n", b"a b c\n", b"a b c\n4 16\nmade", b"a b c\nx y\nmade",
        b"a b c\n4\nmade", b"a b c\n4 0\nmad",
    ],
)  # fmt: skip
def test_a_torn_answer_of_the_interpreter_is_refused(torn: bytes) -> None:
    with pytest.raises(
        ValueError, match=r"bytes of|not enough|argument|subsection|invalid literal"
    ):
        understood(torn, 1)


def test_two_deploys_make_the_same_bytecode(target: Target) -> None:
    """With Python 3.10, whose order of sets follows the hash seed down into the bytes."""
    python = pythons().get("3.10") or pytest.skip("no Python 3.10 on this machine")
    target.use(python)
    source = b"S = {'a', 'b', 'c'}\ndef f(x): return x in {'p', 'q', 'r', 's'}\n"
    bundle = target.usual({"pack/sets.py": source})
    pyc = "pack/__pycache__/sets.cpython-310.pyc"
    made = []
    for _ in range(5):
        target.run(bundle, "deploy")
        made.append(target.read(pyc))
        target.run(bundle, "restore")
    assert len(set(made)) == 1
    assert made[0][4:8] == b"\3\0\0\0"  # hash based, and checked


def test_cache_files_are_those_of_the_module_only(target: Target) -> None:
    for name in ("core.cpython-310.pyc", "core.cpython-310.opt-1.pyc", "core2.cpython-310.pyc"):
        target.write(f"pack/__pycache__/{name}", b"")
    tree = TreeReader(str(target.root), target.site)
    assert Bytecode(tree).of("pack/core.py") == [
        "pack/__pycache__/core.cpython-310.opt-1.pyc",
        "pack/__pycache__/core.cpython-310.pyc",
    ]


def shadow(folder: Path) -> None:
    (folder / "pack").mkdir(parents=True)
    (folder / "pack/__init__.py").write_text("V = 'shadow'\n")


def plant(target: Target, how: str) -> str:
    """Plant a shadow; return what the verdict must say."""
    elsewhere = target.root.parent / "elsewhere"
    if how == "launch folder":
        shadow(target.root / "launch")
        return "current folder"
    if how == "PYTHONPATH":
        shadow(elsewhere)
        target.env["PYTHONPATH"] = str(elsewhere)
        return f"PYTHONPATH puts {elsewhere} first"
    if how == "env_script":
        shadow(elsewhere)
        (target.root / "env.sh").write_text(f"echo noise; export PYTHONPATH={elsewhere}\n")
        return f"PYTHONPATH puts {elsewhere} first"
    if how == "user site":
        home = target.root.parent / "home"
        user = subprocess.run(
            [target.base_python(), "-c", "import site; print(site.getusersitepackages())"],
            env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, check=True,
            timeout=60,
        ).stdout.strip()  # fmt: skip
        shadow(Path(user))
        target.env["HOME"] = str(home)
        target.use(target.base_python(), first=False)
        return "user site"
    if how == ".pth":
        shadow(elsewhere)
        home = target.root.parent / "sited"
        home.mkdir()
        (home / "dev.pth").write_text(f"import sys; sys.path.insert(0, '{elsewhere}')\n")
        (target.root / "env.sh").write_text("")
        target.use(target.base_python(), first=False, sited=home)
        return "dev.pth"
    assert how == "namespace"
    os.unlink(target.top / "pack/__init__.py")
    return "namespace package"


@pytest.mark.parametrize(
    "how", ["launch folder", "PYTHONPATH", "env_script", "user site", ".pth", "namespace"]
)
def test_a_shadow_is_named_with_its_reason(target: Target, how: str) -> None:
    bundle = target.usual()
    options = ("--env-script", "/env.sh") if how in ("env_script", ".pth") else ()
    assert target.run(bundle, "deploy").code == 0
    assert target.states(bundle=bundle) == {}

    reason = plant(target, how)
    outcome = target.run(bundle, "verify", *options)

    assert outcome.code == 10
    assert outcome.states == {"pack/__init__.py": "shadowed"}
    assert reason in outcome.err
    states = {place: said["state"] for place, said in outcome.evidence["origin"].items()}
    apart = "ok" if how == "launch folder" else "shadowed"
    assert states == {"launch": "shadowed", "empty": apart}


def lead(target: Target, how: str) -> tuple[str, ...]:
    """Let the interpreter find the site in this way and no other; return the options for it."""
    near = target.root.parent / "near"
    near.mkdir(exist_ok=True)
    lines = {
        "symlink": f"PYTHONPATH={near}/link",
        "zip": f"PYTHONPATH={near}/first.zip:{target.top}",
        "relative": f"PYTHONPATH=../{SITE.strip('/')}",
        ".pth": f"PYTHONPATH={near}/sited",
        "not at all": "PYTHONPATH=",
    }
    (near / "link").symlink_to(target.top)
    with zipfile.ZipFile(near / "first.zip", "w") as archive:
        archive.writestr("nobody.py", "")
    (near / "sited").mkdir()
    custom = f"import site\nsite.addsitedir({str(near / 'sited')!r})\n"
    (near / "sited" / "sitecustomize.py").write_text(custom)
    (near / "sited" / "ours.pth").write_text(f"{target.top}\n")
    (target.root / "env.sh").write_text(f"export {lines[how]}\n")
    launcher = target.root / "usr/bin/python3"
    launcher.write_text(f'#!/bin/sh\nexec "{target.python}" "$@"\n')
    return ("--env-script", "/env.sh")


def test_a_site_that_the_service_does_not_search_is_unfit_and_left_alone(target: Target) -> None:
    options = lead(target, "not at all")
    before, bundle = target.snapshot(), target.usual()

    for verb in ("check", "deploy"):
        outcome = target.run(bundle, verb, *options)

        assert outcome.code == Exit.UNFIT
        assert f"base.python does not search base.site: {target.top} is not on" in outcome.err
        assert f"a folder that it searches ({os.path.dirname(os.__file__)}" in outcome.err
        assert "env_script /env.sh" in outcome.err
    assert difference(before, target.snapshot()).keys() <= {f"{SITE.strip('/')}/.dcu-bundle"}


def test_a_site_that_is_not_searched_any_more_is_named_and_nobody_edited_it(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0

    outcome = target.run(bundle, "verify", *lead(target, "not at all"))

    assert (outcome.code, outcome.states) == (10, {"pack/__init__.py": "shadowed"})
    for said in outcome.evidence["origin"].values():
        assert "base.python does not search base.site" in said["why"]
        assert "base.site" in said["mend"]
    assert outcome.evidence["met"] == "deployed"


@pytest.mark.parametrize("how", ["symlink", "zip", "relative", ".pth"])
def test_a_site_that_is_searched_by_any_name_is_fit(target: Target, how: str) -> None:
    options, bundle = lead(target, how), target.usual()

    assert target.run(bundle, "deploy", *options).code == 0
    assert target.run(bundle, "verify", *options).code == 0


def test_a_site_without_any_package_yet_is_fit(target: Target) -> None:
    shutil.rmtree(target.top / "pack")
    files = {"pack/__init__.py": b"", "pack/core.py": b"V = 1\n"}
    plan = target.plan(*(planned(path, data, assume=[None]) for path, data in files.items()))
    bundle = target.bundle(plan, list(files.values()))

    assert target.run(bundle, "deploy").code == 0
    assert target.run(bundle, "verify").code == 0


def test_noise_on_stdout_does_not_disturb_the_answer(target: Target) -> None:
    (target.root / "env.sh").write_text("echo hello; echo '{}'; echo moo >&2\n")
    launcher = target.root / "usr/bin/python3"
    launcher.write_text(launcher.read_text().replace("exec", "echo INFO starting\nexec", 1))
    bundle = target.usual()
    assert target.run(bundle, "deploy", "--env-script", "/env.sh").code == 0
    assert target.run(bundle, "verify", "--env-script", "/env.sh").code == 0


def test_an_interpreter_that_hangs_ends_with_its_time(target: Target) -> None:
    (target.root / "env.sh").write_text("sleep 300 & sleep 300\n")
    bundle = target.usual()
    outcome = target.run(bundle, "check", "--env-script", "/env.sh", "--timeout", "1")
    assert outcome.code == 3
    assert "no end after 1 s" in outcome.err


def test_settings_that_move_or_stop_bytecode_are_noted(target: Target) -> None:
    bundle = target.usual()
    target.run(bundle, "deploy")
    target.env.update(PYTHONPYCACHEPREFIX="/elsewhere", PYTHONDONTWRITEBYTECODE="1")
    python = target.run(bundle, "verify").evidence["python"]
    assert (python["pycache_prefix"], python["writes_bytecode"]) == ("/elsewhere", False)
