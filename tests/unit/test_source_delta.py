"""What `delta` says of two commits, on real repositories, and what it refuses."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.agent.plan import checked_path
from deploy.errors import BadValues, StaleLock, Unfit
from deploy.git import Git, commit_head, fast_import, init_bare, quoted
from deploy.source import Rules, copy_blobs, delta, read_blobs
from deploy.values import Change, Delta, PathClass

RULES = Rules(include=("vllm/**",), ignore={"tests/**": "not installed"})
ODD = ("中文.py", "with space.py", 'q"uote.py', "ta\tb.py", "new\nline.py", "-dash.py")
IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")


class Repo:
    """A repository of a test, written with the real git and the developer's ordinary commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *args: str, stdin: bytes = b"", ok: bool = True) -> str:
        options = (*IDENTITY, "-c", "protocol.file.allow=always")
        done = subprocess.run(
            ("git", *options, *args),
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0 or not ok, done.stderr.decode()
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> Path:
        where = self.folder / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(data.encode() if isinstance(data, str) else data)
        where.chmod(mode)
        return where

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", "x", "--allow-empty")
        return self.git("rev-parse", "HEAD")

    def tree(self, *entries: tuple[str, str, bytes]) -> str:
        """Make a tree of (mode, content or id, name), names unchecked, as a hostile one may be."""
        rows = b""
        for mode, content, name in entries:
            oid = content
            if mode not in ("160000", "40000"):
                oid = self.git("hash-object", "-w", "--stdin", stdin=content.encode())
            rows += mode.encode() + b" " + name + b"\0" + bytes.fromhex(oid)
        return self.git("hash-object", "-w", "--literally", "-t", "tree", "--stdin", stdin=rows)

    def commit_tree(self, tree: str, parent: str = "") -> str:
        parents = ("-p", parent) if parent else ()
        return self.git("commit-tree", tree, *parents, "-m", "x")


@pytest.fixture(autouse=True)
def _own_git_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gitconfig"
    config.write_text("")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


def based(repo: Repo) -> str:
    repo.write("vllm/a.py", "A = 1\n")
    return repo.commit()


def of(repo: Repo, base: str, head: str, rules: Rules = RULES) -> Delta:
    return delta(repo.folder, base=base, head=head, rules=rules)


def refused(repo: Repo, base: str, head: str, rules: Rules = RULES) -> BadValues:
    with pytest.raises(BadValues) as caught:
        of(repo, base, head, rules)
    return caught.value


def by_path(found: Delta) -> dict[str, Change]:
    return {change.path: change for change in found.changes}


def test_names_that_git_would_quote_keep_their_exact_bytes(repo: Repo) -> None:
    base = based(repo)
    for name in ODD:
        repo.write(f"vllm/{name}", name)
    head = repo.commit()

    changes = by_path(of(repo, base, head))

    assert set(changes) == {f"vllm/{name}" for name in ODD}
    for name in ODD:
        new = changes[f"vllm/{name}"].new
        assert new is not None
        assert new.sha256 == hashlib.sha256(name.encode()).hexdigest()
        assert dict(read_blobs(repo.folder, [new.oid])) == {new.oid: name.encode()}


def test_every_path_that_passes_is_one_that_the_plan_accepts(repo: Repo) -> None:
    base = based(repo)
    for name in ODD:
        repo.write(f"vllm/{name}", name)

    found = of(repo, base, repo.commit())

    assert [checked_path(change.path) for change in found.changes] == [
        change.path for change in found.changes
    ]


@pytest.mark.parametrize("edit", ["", "# edited on the way\n"])
def test_a_rename_is_a_removal_and_an_addition(repo: Repo, edit: str) -> None:
    text = "".join(f"line{n} = {n}\n" for n in range(50))
    repo.write("vllm/ren.py", text)
    base = repo.commit()
    repo.git("mv", "vllm/ren.py", "vllm/renamed.py")
    repo.write("vllm/renamed.py", text + edit)

    changes = by_path(of(repo, base, repo.commit()))

    assert changes["vllm/ren.py"].new is None
    assert changes["vllm/renamed.py"].old is None


@pytest.mark.parametrize(
    "config", [("diff.renames", "copies"), ("diff.orderFile", "order"), ("core.quotePath", "true")]
)
def test_the_users_diff_settings_change_nothing(repo: Repo, config: tuple[str, str]) -> None:
    base = based(repo)
    repo.write("vllm/z.py", "A = 1\n")
    repo.write("vllm/中.py", "A = 1\n")
    head = repo.commit()
    plain = of(repo, base, head)

    (repo.folder / "order").write_text("*z.py\n")
    repo.git("config", *config)

    assert of(repo, base, head) == plain


def clone(up: Repo, where: Path, *options: str) -> Repo:
    up.git("clone", "-q", *options, f"file://{up.folder}", str(where))
    found = Repo.__new__(Repo)
    found.folder = where
    return found


def history(repo: Repo) -> list[str]:
    ids = []
    for n in range(3):
        repo.write(f"vllm/f{n}.py", str(n))
        ids.append(repo.commit())
    return ids


def test_a_base_that_a_shallow_clone_lacks_is_named_with_the_way_to_get_it(
    repo: Repo, tmp_path: Path
) -> None:
    ids = history(repo)
    shallow = clone(repo, tmp_path / "a", "--depth", "1")

    error = refused(shallow, ids[1], ids[2])

    assert ids[1] in error.what
    assert "shallow" in error.why
    assert "--unshallow" in error.fix


def test_a_base_that_a_full_clone_lacks_is_not_called_shallow(repo: Repo, tmp_path: Path) -> None:
    ids = history(repo)

    error = refused(clone(repo, tmp_path / "a"), "1" * 40, ids[2])

    assert "1" * 40 in error.what
    assert "full clone" in error.why
    assert "fetch REMOTE" in error.fix


def test_a_history_that_was_cut_off_is_told_from_an_unrelated_one(
    repo: Repo, tmp_path: Path
) -> None:
    ids = history(repo)
    shallow = clone(repo, tmp_path / "b", "--depth", "1")
    shallow.git("fetch", "-q", "--depth", "1", "origin", ids[1])
    squashed = Repo(tmp_path / "c")
    squashed.write("vllm/f0.py", "squashed")
    own = squashed.commit()
    squashed.git("fetch", "-q", f"file://{repo.folder}", "main")

    cut, unrelated = refused(shallow, ids[1], ids[2]), refused(squashed, ids[1], own)

    assert "cut off" in cut.why
    assert "--unshallow" in cut.fix
    assert "unrelated" in unrelated.why


def test_a_base_beside_heads_history_is_refused_with_where_they_parted(repo: Repo) -> None:
    first = based(repo)
    repo.git("checkout", "-qb", "side")
    repo.write("vllm/side.py", "1")
    side = repo.commit()
    repo.git("checkout", "-q", "main")
    repo.write("vllm/b.py", "1")

    error = refused(repo, side, repo.commit())

    assert first in error.why


def test_a_head_that_base_descends_from_is_called_swapped(repo: Repo) -> None:
    ids = history(repo)

    error = refused(repo, ids[2], ids[1])

    assert "swapped" in error.fix
    assert ids[1] not in error.fix


def test_equal_trees_are_nothing_to_deploy(repo: Repo) -> None:
    base = based(repo)

    assert "nothing to deploy" in refused(repo, base, repo.commit()).what
    assert "nothing to deploy" in refused(repo, base, base).what


@pytest.mark.parametrize("name", ["HEAD", "main", "-p", "1234567", "", "A" * 40, "1" * 64])
def test_only_a_full_commit_id_is_a_commit(repo: Repo, name: str) -> None:
    base = based(repo)

    assert "full commit id" in refused(repo, name, base).what


def test_an_id_of_a_blob_is_not_a_commit(repo: Repo) -> None:
    base = based(repo)

    error = refused(repo, repo.git("rev-parse", "HEAD:vllm/a.py"), base)

    assert "is not a commit" in error.what


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("through", ["repo", "link"])
def test_a_repository_of_another_user_is_refused_with_both_uids(
    repo: Repo, tmp_path: Path, through: str
) -> None:
    base = based(repo)
    repo.write("vllm/a.py", "A = 2\n")
    head = repo.commit()
    (tmp_path / "link").symlink_to(repo.folder)
    for path in [repo.folder, *repo.folder.rglob("*")]:
        os.chown(path, 12345, 12345)

    with pytest.raises(BadValues) as caught:
        delta(tmp_path / through, base=base, head=head, rules=RULES)

    assert str(repo.folder) in caught.value.what
    assert "12345" in caught.value.why
    assert f"uid {os.geteuid()}" in caught.value.why
    assert caught.value.fix.endswith(f"safe.directory {repo.folder}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_the_user_declared_safe_is_read(repo: Repo, tmp_path: Path) -> None:
    base = based(repo)
    repo.write("vllm/a.py", "A = 2\n")
    head = repo.commit()
    for path in [repo.folder, *repo.folder.rglob("*")]:
        os.chown(path, 12345, 12345)
    (tmp_path / "gitconfig").write_text(f"[safe]\n\tdirectory = {repo.folder}\n")

    assert len(of(repo, base, head).changes) == 1


def test_a_changed_mode_is_a_change_of_its_own(repo: Repo) -> None:
    repo.write("vllm/tool.sh", "#!/bin/sh\necho hi\n")
    base = repo.commit()
    repo.write("vllm/tool.sh", "#!/bin/sh\necho hi\n", mode=0o755)

    (change,) = of(repo, base, repo.commit()).changes

    assert change.old is not None
    assert change.new is not None
    assert (change.old.mode, change.new.mode) == ("100644", "100755")
    assert change.old.sha256 == change.new.sha256


def with_submodule(repo: Repo, tmp_path: Path, where: str) -> tuple[str, str, list[str]]:
    inner = Repo(tmp_path / "inner")
    inner.write("f.py", "1")
    ids = [inner.commit()]
    inner.write("f.py", "2")
    ids.append(inner.commit())
    repo.git("submodule", "--quiet", "add", f"file://{inner.folder}", where)
    repo.git("-C", where, "checkout", "-q", ids[0])
    repo.write("vllm/a.py", "1")
    base = repo.commit()
    repo.git("-C", where, "checkout", "-q", ids[1])
    return base, repo.commit(), ids


def test_a_submodule_below_the_package_is_refused_with_both_commits(
    repo: Repo, tmp_path: Path
) -> None:
    base, head, ids = with_submodule(repo, tmp_path, "vllm/third")

    error = refused(repo, base, head)

    assert "vllm/third: it is a submodule" in error.why
    assert all(oid in error.why for oid in ids)


def test_an_ignored_submodule_is_listed_and_noted(repo: Repo, tmp_path: Path) -> None:
    base, head, ids = with_submodule(repo, tmp_path, "tests/third")

    found = of(repo, base, head)

    (change,) = found.changes
    assert change.cls is PathClass.IGNORED
    assert change.new is not None
    assert (change.new.mode, change.new.oid, change.new.sha256) == ("160000", ids[1], "")
    assert any(ids[0] in note and ids[1] in note for note in found.notes)


def test_what_is_deployed_is_the_blob_whatever_the_checkout_made_of_it(
    repo: Repo, tmp_path: Path
) -> None:
    base = based(repo)
    repo.write("vllm/m.py", "V = 1\n")
    head = repo.commit()
    crlf = clone(repo, tmp_path / "c", "-c", "core.autocrlf=true")
    assert (crlf.folder / "vllm/m.py").read_bytes() == b"V = 1\r\n"

    found = of(crlf, base, head)

    (change,) = found.changes
    assert change.new is not None
    assert change.new.sha256 == hashlib.sha256(b"V = 1\n").hexdigest()
    assert any("CRLF" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "#!/bin/sh\r\necho ok\r\n"),
        ("run.sh", "echo ok\r\n"),
        ("run", "#!/usr/bin/env bash\necho ok\r\n"),
        ("run", "#!/usr/bin/python3\r\nprint(1)\n"),
    ],
)
def test_a_script_with_windows_line_ends_is_refused(repo: Repo, name: str, text: str) -> None:
    base = based(repo)
    repo.write(f"vllm/{name}", text, mode=0o755)

    assert (
        f"vllm/{name}: it is a script with Windows line ends"
        in refused(repo, base, repo.commit()).why
    )


def test_a_module_with_windows_line_ends_is_python_all_the_same(repo: Repo) -> None:
    base = based(repo)
    repo.write("vllm/b.py", "A = 1\r\n")

    assert len(of(repo, base, repo.commit()).changes) == 1


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{:064d}\nsize 52428800\n"


@pytest.mark.parametrize("path", ["vllm/k.so", "csrc/weights.cu"])
def test_an_lfs_pointer_is_refused_with_what_it_points_to(repo: Repo, path: str) -> None:
    base = based(repo)
    repo.write(path, POINTER.format(7))

    why = refused(repo, base, repo.commit()).why

    assert path in why
    assert "52428800 bytes" in why
    assert f"{7:064d}" in why


def test_a_pointer_that_is_replaced_is_refused_too(repo: Repo) -> None:
    repo.write("vllm/k.so", POINTER.format(7))
    base = repo.commit()
    repo.write("vllm/k.so", b"\x7fELF")

    assert "before, it is a Git LFS pointer" in refused(repo, base, repo.commit()).why


def test_a_text_about_lfs_is_no_pointer(repo: Repo) -> None:
    base = based(repo)
    repo.write("vllm/lfs.md", "see version https://git-lfs.github.com/spec/v1\n")

    assert len(of(repo, base, repo.commit()).changes) == 1


def test_every_path_that_has_no_class_is_listed(repo: Repo) -> None:
    base = based(repo)
    for path in ("README.md", "docs/x.md", "vllm/b.py"):
        repo.write(path, "1")

    error = refused(repo, base, repo.commit())

    assert error.what.startswith("2 changed files in ")
    assert "README.md, docs/x.md" in error.why
    assert "vllm/b.py" not in error.why
    assert "overlay.ignore" in error.fix


def test_one_path_that_has_no_class_is_one_file(repo: Repo) -> None:
    base = based(repo)
    repo.write("README.md", "1")

    error = refused(repo, base, repo.commit())

    assert error.what == f"1 changed file in {repo.folder} is in no class"


def test_each_path_lands_in_the_class_of_its_rule(repo: Repo) -> None:
    base = based(repo)
    for path in ("vllm/b.py", "csrc/rocm/k.cu", "setup.py", "tests/t.py"):
        repo.write(path, "1")

    found = of(repo, base, repo.commit())

    classes = {change.path: change.cls.value for change in found.changes}
    assert classes == {
        "vllm/b.py": "overlay",
        "csrc/rocm/k.cu": "kernel",
        "setup.py": "kernel",
        "tests/t.py": "ignored",
    }
    assert by_path(found)["tests/t.py"].reason == "ignore tests/**: not installed"


def test_an_ignore_wins_over_a_kernel_and_a_kernel_over_an_include() -> None:
    rules = Rules(include=("**",), ignore={"csrc/old/**": "dead"}, kernels=("csrc/**",))

    assert rules.classify("csrc/old/k.cu") == (PathClass.IGNORED, "ignore csrc/old/**: dead")
    assert rules.classify("csrc/k.cu") == (PathClass.KERNEL, "kernel source csrc/**")
    assert rules.classify("README.md") == (PathClass.OVERLAY, "include **")


def hostile(repo: Repo, mode: str, content: str, name: bytes) -> BadValues:
    base_tree = repo.tree(("100644", "1", b"a.py"))
    head_tree = repo.tree(
        *sorted([("100644", "1", b"a.py"), (mode, content, name)], key=lambda e: e[2])
    )
    base = repo.commit_tree(repo.tree(("40000", base_tree, b"vllm")))
    head = repo.commit_tree(repo.tree(("40000", head_tree, b"vllm")), base)
    with pytest.raises(BadValues) as caught:
        delta(repo.folder, base=base, head=head, rules=RULES, check_worktree=False)
    return caught.value


@pytest.mark.parametrize(
    ("mode", "content", "name", "why"),
    [
        ("100644", "x", b"gbk\xd6\xd0.py", "not UTF-8"),
        ("100644", "x", b"n" * 300, "longer than 255 bytes"),
        ("100644", "x", b"..", "leaves the repository"),
        ("100644", "x", b".GIT", "leaves the repository"),
        ("100644", "x", b"a.pyc", "bytecode"),
        ("120000", "/etc/passwd", b"l", "absolute path /etc/passwd"),
        ("120000", "../../etc/passwd", b"l", "leads out of vllm"),
        ("120000", "../csrc/x", b"l", "leads out of vllm"),
        ("120000", "../vllmx", b"l", "leads out of vllm"),
        ("120000", "", b"l", "without a usable target"),
        ("100644", "x", b"A.py", "collide"),
    ],
)
def test_a_path_that_no_target_could_hold_is_refused(
    repo: Repo, mode: str, content: str, name: bytes, why: str
) -> None:
    error = hostile(repo, mode, content, name)

    assert why in str(error)
    assert "\x1b" not in str(error)


def test_control_characters_of_a_name_never_reach_the_terminal(repo: Repo) -> None:
    base = based(repo)
    repo.write("docs/\x1b[2Jx", "1")

    assert "docs/\\x1b[2Jx" in refused(repo, base, repo.commit()).why


def test_a_link_that_stays_inside_is_a_change_like_any_other(repo: Repo) -> None:
    base = based(repo)
    (repo.folder / "vllm/l.py").symlink_to("a.py")

    (change,) = of(repo, base, repo.commit()).changes

    assert change.new is not None
    assert change.new.mode == "120000"


def test_a_name_that_only_changes_its_capitals_is_no_collision(repo: Repo) -> None:
    base = based(repo)
    repo.git("mv", "vllm/a.py", "vllm/A.py")

    assert len(of(repo, base, repo.commit()).changes) == 2


def test_two_spellings_of_one_accent_collide(repo: Repo) -> None:
    repo.write("vllm/\u00e9.py", "1")
    base = repo.commit()
    repo.write("vllm/e\u0301.py", "1")

    assert "collide" in refused(repo, base, repo.commit()).what


def test_a_bare_repository_serves_as_well(repo: Repo, tmp_path: Path) -> None:
    base = based(repo)
    repo.write("vllm/a.py", "A = 2\n")
    head = repo.commit()
    bare = clone(repo, tmp_path / "bare.git", "--bare")

    found = of(bare, base, head)

    assert found.changes == of(repo, base, head).changes
    assert found.notes == (
        "there is no work tree, so none was looked through for uncommitted edits",
    )


NAMES = st.text("ab é中\n\t\"'*\\-", min_size=1, max_size=5)
PATHS = st.builds(
    lambda folders, name: "/".join(["vllm", *(f"{f}.d" for f in folders), f"{name}.py"]),
    st.lists(NAMES, max_size=2),
    NAMES,
)
FILES = st.tuples(st.sampled_from(["100644", "100755"]), st.binary(max_size=20))
TREES = st.dictionaries(PATHS, FILES, min_size=1, max_size=8)


def committed(repo: Path, files: dict[str, tuple[str, bytes]], parent: str = "") -> str:
    stream = [commit_head("refs/heads/x", message="x", time=1_700_000_000, parent=parent)]
    stream.append(b"deleteall\n")
    for path, (mode, data) in files.items():
        stream.append(b"M %s inline %s\n" % (mode.encode(), quoted(path.encode())))
        stream.append(b"data %d\n%s\n" % (len(data), data))
    return fast_import(Git(repo, own=True), stream)


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(before=TREES, after=TREES)
def test_the_base_with_all_changes_made_is_the_head(
    tmp_path: Path, before: dict[str, tuple[str, bytes]], after: dict[str, tuple[str, bytes]]
) -> None:
    """No path is lost, none is invented, and both sides carry their true digests."""
    repo = tmp_path / "law.git"
    if not repo.exists():
        init_bare(repo)
    base = committed(repo, before | {"README": ("100644", b"base")})
    head = committed(repo, after | {"README": ("100644", b"head")}, base)
    rules = Rules(include=("vllm/**",), ignore={"README": "not installed"})

    found = delta(repo, base=base, head=head, rules=rules)

    now = {path: (mode, hashlib.sha256(data).hexdigest()) for path, (mode, data) in before.items()}
    for change in found.of(PathClass.OVERLAY):
        old = (change.old.mode, change.old.sha256) if change.old else None
        assert now.pop(change.path, None) == old
        if change.new:
            now[change.path] = (change.new.mode, change.new.sha256)
    assert now == {p: (mode, hashlib.sha256(data).hexdigest()) for p, (mode, data) in after.items()}


def test_a_work_tree_that_is_said_to_be_elsewhere_hides_no_edit(repo: Repo, tmp_path: Path) -> None:
    base = based(repo)
    repo.write("vllm/a.py", "A = 2\n")
    head = repo.commit()
    (tmp_path / "elsewhere").mkdir()
    repo.git("config", "core.worktree", str(tmp_path / "elsewhere"))
    repo.write("vllm/a.py", "A = 3\n")
    repo.write("vllm/new.py", "N = 1\n")

    why = refused(repo, base, head).why

    assert "vllm/a.py (modified)" in why
    assert "vllm/new.py" in why


def test_a_repository_with_sha256_ids_is_named_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    init = ("git", "init", "-q", "--object-format=sha256", str(folder))
    subprocess.run(init, check=True, timeout=60)

    with pytest.raises(BadValues, match="sha256 ids"):
        delta(folder, base="1" * 40, head="2" * 40, rules=RULES)


def test_a_folder_inside_a_repository_is_not_taken_for_it(repo: Repo) -> None:
    base = based(repo)
    repo.write("vllm/a.py", "A = 2\n")
    head = repo.commit()

    with pytest.raises(BadValues, match="is not a git repository"):
        delta(repo.folder / "vllm", base=base, head=head, rules=RULES)


def test_replaced_and_grafted_objects_are_not_believed(repo: Repo) -> None:
    base = based(repo)
    repo.write("vllm/a.py", "A = 2\n")
    head = repo.commit()
    plain = of(repo, base, head)
    other = repo.git("hash-object", "-w", "--stdin", stdin=b"A = 666\n")
    repo.git("replace", repo.git("rev-parse", f"{head}:vllm/a.py"), other)

    assert of(repo, base, head) == plain


def test_a_damaged_object_is_named(repo: Repo) -> None:
    base = based(repo)
    repo.write("vllm/a.py", "A = 2\n")
    head = repo.commit()
    oid = repo.git("rev-parse", f"{head}:vllm/a.py")
    other = repo.git("hash-object", "-w", "--stdin", stdin=b"A = 3\n")
    path = repo.folder / ".git/objects"
    victim = path / oid[:2] / oid[2:]
    victim.unlink()
    shutil.copy(path / other[:2] / other[2:], victim)

    with pytest.raises(StaleLock) as caught:
        delta(repo.folder, base=base, head=head, rules=RULES, check_worktree=False)

    assert oid in str(caught.value)


def test_copied_blobs_are_the_bytes_of_git(repo: Repo, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    repo.write("vllm/big.bin", data)
    repo.commit()
    oid = repo.git("rev-parse", "HEAD:vllm/big.bin")

    with (tmp_path / "out").open("wb") as out:
        copy_blobs(repo.folder, [(oid, out)])

    assert (tmp_path / "out").read_bytes() == data


def git_in_path(folder: Path, script: str) -> str:
    folder.mkdir()
    (folder / "git").write_text(script)
    (folder / "git").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_machine_without_git_is_told_what_to_install(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = based(repo)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(Unfit) as caught:
        of(repo, base, base)

    assert caught.value.exit == 3
    assert "apt-get install git" in caught.value.fix


def test_an_old_git_is_named_when_it_fails(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = based(repo)
    old = '#!/bin/sh\n[ "$1" = version ] && echo "git version 1.8.3.1" && exit\nexit 129\n'
    monkeypatch.setenv("PATH", git_in_path(tmp_path / "bin", old))

    with pytest.raises(Unfit, match="too old") as caught:
        of(repo, base, base)

    assert "1.8" in caught.value.why


def count_git(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Put a git before the real one that writes down each call."""
    log = folder / "calls"
    real = shutil.which("git")
    script = f'#!/bin/sh\necho "$*" >> {log}\nexec {real} "$@"\n'
    monkeypatch.setenv("PATH", git_in_path(folder / "bin", script))
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_a_plan_costs_four_git_processes(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = based(repo)
    for n in range(30):
        repo.write(f"vllm/d{n % 7}/f{n}.py", str(n))
    head = repo.commit()
    calls = count_git(tmp_path, monkeypatch)

    found = of(repo, base, head)

    assert len(found.changes) == 30
    assert len(calls()) == 4
