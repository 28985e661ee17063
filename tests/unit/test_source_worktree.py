"""Edits that no commit has are found by their bytes; a hostile repository runs no code."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.errors import BadValues
from deploy.layout import HERE
from deploy.source import Rules, delta, worktree_commit
from deploy.values import Delta
from tests.table import Found, plants

RULES = Rules(include=("vllm/**",), ignore={"tests/**": "not installed"})
IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")


class Checkout:
    """A repository with one commit to deploy, base -> head, and a clean work tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")
        self.write("vllm/a.py", "A = 1\n")
        self.write("vllm/b.py", "B = 1\n")
        self.write("csrc/k.cu", "k\n")
        self.write("csrc/cuda_compat.h", "h\n")
        self.write("docs/x.md", "x\n")
        self.write(".gitignore", "*.log\n*.hip\nlib/\n__pycache__/\nhip_*.h\nvllm/_version.py\n")
        self.base = self.commit()
        self.write("vllm/a.py", "A = 2\n")
        self.head = self.commit()

    def git(self, *args: str) -> str:
        done = subprocess.run(
            ("git", *IDENTITY, "-c", "protocol.file.allow=always", *args),
            cwd=self.folder,
            capture_output=True,
            check=True,
            timeout=60,
        )
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def write(self, path: str, text: str) -> None:
        where = self.folder / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(text.encode())

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", "x")
        return self.git("rev-parse", "HEAD")

    def delta(self, may_be_dirty: tuple[str, ...] = ()) -> Delta:
        return delta(
            self.folder, base=self.base, head=self.head, rules=RULES, may_be_dirty=may_be_dirty
        )

    def why(self) -> str:
        with pytest.raises(BadValues, match="is dirty") as caught:
            self.delta()
        return caught.value.why


@pytest.fixture(autouse=True)
def _own_git_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gitconfig"
    config.write_text("")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def repo(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "repo")


def test_a_clean_checkout_says_nothing(repo: Checkout) -> None:
    found = repo.delta()

    assert (found.dirty, found.notes) == ((), ())


def test_one_file_holds_and_two_files_hold(repo: Checkout) -> None:
    repo.write("vllm/b.py", "B = 3\n")
    with pytest.raises(BadValues, match="is dirty: 1 file holds what"):
        repo.delta()
    repo.write("csrc/new.cu", "1")
    with pytest.raises(BadValues, match="is dirty: 2 files hold what"):
        repo.delta()


def test_modified_and_untracked_files_are_all_named_by_class(repo: Checkout) -> None:
    repo.write("vllm/b.py", "B = 3\n")
    repo.write("vllm/untracked.py", "1")
    repo.write("csrc/new.cu", "1")

    assert repo.why() == (
        "csrc/new.cu (untracked), vllm/b.py (modified), vllm/untracked.py (untracked)"
    )


def test_an_edit_of_equal_size_and_time_is_found(repo: Checkout) -> None:
    path = repo.folder / "vllm/b.py"
    before = path.stat()
    path.write_text("B = 9\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert repo.why() == "vllm/b.py (modified)"


def test_each_way_of_not_committing_has_its_word(repo: Checkout) -> None:
    repo.write("vllm/staged.py", "1")
    repo.write("vllm/b.py", "B = 5\n")
    repo.git("add", "-A")
    repo.git("rm", "-q", "--cached", "csrc/k.cu")
    (repo.folder / "vllm/a.py").unlink()

    assert repo.why() == (
        "csrc/k.cu (removed, not committed), csrc/k.cu (untracked), vllm/a.py (deleted), "
        "vllm/b.py (staged, not committed), vllm/staged.py (added, not committed)"
    )


def test_a_mode_that_was_not_committed_is_found(repo: Checkout) -> None:
    (repo.folder / "vllm/b.py").chmod(0o755)

    assert repo.why() == "vllm/b.py (mode changed)"


def test_a_file_system_without_modes_gives_no_false_alarm(repo: Checkout) -> None:
    repo.git("config", "core.fileMode", "false")
    (repo.folder / "vllm/b.py").chmod(0o755)

    assert repo.delta().dirty == ()


def test_what_the_manifest_allows_is_reported_and_not_refused(repo: Checkout) -> None:
    repo.write("vllm/b.py", "B = 3\n")

    found = repo.delta(may_be_dirty=("vllm/b.py",))

    assert found.dirty == ("vllm/b.py",)
    assert found.notes == ("dirty, allowed by may_be_dirty: vllm/b.py (modified)",)
    assert [change.path for change in found.changes] == ["vllm/a.py"]


def test_edits_outside_of_the_watched_folders_do_not_matter(repo: Checkout) -> None:
    repo.write("docs/x.md", "y\n")
    repo.write("tests/new.py", "1")

    assert repo.delta().dirty == ()


@pytest.mark.parametrize("path", ["vllm/lib/new.py", "vllm/lib/t.json", "csrc/own.hip"])
def test_an_ignored_file_that_could_be_source_is_refused(repo: Checkout, path: str) -> None:
    repo.write(path, "1")

    assert repo.why() == f"{path} (ignored by git, yet it could be source)"


def test_other_ignored_files_are_only_counted(repo: Checkout) -> None:
    repo.write("vllm/__pycache__/a.cpython-310.pyc", "1")
    repo.write("vllm/__pycache__/odd.py", "a cache")
    repo.write("vllm/run.log", "1")
    repo.write("vllm/_version.py", "generated")
    repo.write("csrc/k.hip", "hipify's twin of k.cu")
    repo.write("csrc/hip_compat.h", "hipify's twin of cuda_compat.h")

    assert repo.delta().notes == ("6 files below the watched folders are ignored by git",)


@pytest.mark.parametrize(
    ("flag", "word"),
    [("--assume-unchanged", "assume-unchanged"), ("--skip-worktree", "skip-worktree")],
)
def test_an_edit_that_git_was_told_to_overlook_is_found_with_the_bit(
    repo: Checkout, flag: str, word: str
) -> None:
    repo.git("update-index", flag, "vllm/b.py")
    assert repo.delta().notes == (f"vllm/b.py: marked {word}, its bytes are right",)

    repo.write("vllm/b.py", "B = 77\n")

    assert repo.git("status", "--porcelain") == ""
    assert repo.why() == f"vllm/b.py (modified, hidden from git by {word})"


def test_a_sparse_work_tree_is_not_dirty(repo: Checkout) -> None:
    repo.git("update-index", "--skip-worktree", "vllm/b.py")
    (repo.folder / "vllm/b.py").unlink()

    assert repo.delta().notes == ("1 files are left out of this sparse work tree",)


def test_another_commit_in_the_work_tree_is_noted(repo: Checkout) -> None:
    repo.write("vllm/b.py", "B = 3\n")
    later = repo.commit()

    (note,) = repo.delta().notes

    assert later in note


def test_a_repository_inside_is_untracked_as_a_whole(repo: Checkout) -> None:
    Checkout(repo.folder / "vllm/inner")

    assert repo.why() == "vllm/inner/ (untracked)"


def test_an_edit_inside_a_submodule_is_found(repo: Checkout, tmp_path: Path) -> None:
    inner = Checkout(tmp_path / "inner")
    repo.git("submodule", "--quiet", "add", f"file://{inner.folder}", "vllm/third")
    repo.base = repo.commit()
    repo.write("vllm/a.py", "A = 7\n")
    repo.head = repo.commit()
    assert repo.delta().dirty == ()

    repo.write("vllm/third/vllm/b.py", "edited")
    repo.git("-C", "vllm/third", "checkout", "-q", inner.base)

    assert repo.why() == (
        f"vllm/third (submodule at {inner.base} instead of {inner.head}), "
        "vllm/third/vllm/b.py (modified, in a submodule)"
    )


def test_a_file_that_cannot_be_reached_is_no_clean_one(repo: Checkout) -> None:
    repo.write("vllm/sub/c.py", "C = 1\n")
    repo.head = repo.commit()
    shutil.rmtree(repo.folder / "vllm/sub")
    (repo.folder / "vllm/sub").symlink_to("sub")

    assert "vllm/sub/c.py (unreadable: Too many levels of symbolic links)" in repo.why()


WALK = """
import os, sys
from deploy.worktree import _walk
os.fchdir(int(sys.argv[1]))
os.setuid(65534)
list(_walk(b".", ["vllm"], set()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_that_cannot_be_listed_is_named(repo: Checkout) -> None:
    repo.write("vllm/shut/__pycache__/x.pyc", "1")
    (repo.folder / "vllm/shut").chmod(0)
    me = os.open(repo.folder, os.O_RDONLY)
    try:
        done = subprocess.run(
            (sys.executable, "-c", WALK, str(me)),
            pass_fds=[me],
            capture_output=True,
            check=False,
            timeout=60,
            env={"PYTHONPATH": str(HERE.top)},
        )
    finally:
        os.close(me)

    assert b"the folder ./vllm/shut cannot be looked through" in done.stderr


def test_names_that_are_no_text_are_found_and_printed_safely(repo: Checkout) -> None:
    where = os.fsencode(repo.folder) + b"/vllm/\xff\x1b.py"
    with open(where, "wb") as file:
        file.write(b"1")

    assert repo.why() == "vllm/\\udcff\\x1b.py (untracked)"


@pytest.mark.parametrize(
    ("attributes", "config", "committed", "word"),
    [
        ("*.py eol=crlf\n", (), "V = 1\n", "CRLF"),
        ("*.py ident\n", (), "# $Id$\n", "ident"),
        ("", ("core.autocrlf", "true"), "V = 1\n", "CRLF"),
    ],
)
def test_a_conversion_of_gits_own_is_named_and_not_taken_for_an_edit(
    repo: Checkout, attributes: str, config: tuple[str, ...], committed: str, word: str
) -> None:
    if attributes:
        repo.write(".gitattributes", attributes)
        repo.base = repo.commit()
    repo.write("vllm/b.py", committed)
    repo.head = repo.commit()
    if config:
        repo.git("config", *config)
    (repo.folder / "vllm/b.py").unlink()
    repo.git("checkout", "--", "vllm/b.py")
    assert (repo.folder / "vllm/b.py").read_bytes() != committed.encode()

    (note,) = repo.delta().notes

    assert note == f"vllm/b.py: the work tree differs from the blob by filter: {word}"


@pytest.mark.parametrize(
    ("attributes", "committed", "edited"),
    [
        ("", "V = 1\n", "V = 1\r\n"),
        ("*.py -text\n", "V = 1\n", "V = 1\r\n"),
        ("", "# $Id$\n", "# $Id: mine $\n"),
    ],
)
def test_an_edit_that_only_looks_like_a_conversion_is_an_edit(
    repo: Checkout, attributes: str, committed: str, edited: str
) -> None:
    repo.write(".gitattributes", attributes)
    repo.base = repo.commit()
    repo.write("vllm/b.py", committed)
    repo.head = repo.commit()
    repo.write("vllm/b.py", edited)

    assert repo.why() == "vllm/b.py (modified)"


def test_the_content_of_an_lfs_file_is_not_an_edit_of_its_pointer(repo: Checkout) -> None:
    data = "weights"
    sha = hashlib.sha256(data.encode()).hexdigest()
    repo.write(".gitattributes", "*.bin filter=lfs -text\n")
    repo.write(
        "vllm/w.bin", f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize 7\n"
    )
    repo.base = repo.commit()
    repo.write("vllm/a.py", "A = 5\n")
    repo.head = repo.commit()
    repo.write("vllm/w.bin", data)

    (note,) = repo.delta().notes

    assert note == "vllm/w.bin: the work tree differs from the blob by filter: LFS"


# --- a hostile repository ---------------------------------------------------------------------


HOSTILE = {
    "core.fsmonitor": "{touch}",
    "core.pager": "{touch}",
    "core.sshCommand": "{touch}",
    "core.alternateRefsCommand": "{touch}",
    "diff.external": "{touch}",
    "diff.evil.textconv": "{touch}",
    "diff.evil.command": "{touch}",
    "filter.evil.clean": "{touch}",
    "filter.evil.smudge": "{touch}",
    "filter.evil.process": "{touch}",
    "alias.diff-tree": "!{touch}",
    "alias.ls-files": "!{touch}",
    "credential.helper": "!{touch}",
    "uploadpack.packObjectsHook": "{touch}",
}


def poisoned(repo: Checkout, mark: Path) -> str:
    """Set every trap that a repository's own files can hold; return the command they all run."""
    script = mark.with_suffix(".sh")
    script.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    script.chmod(0o755)
    for name, value in HOSTILE.items():
        repo.git("config", name, value.format(touch=script))
    hooks = repo.folder / ".git/hooks"
    hooks.mkdir(exist_ok=True)
    for hook in ("post-index-change", "reference-transaction", "post-checkout", "pre-commit"):
        shutil.copy(script, hooks / hook)
    (repo.folder / ".git/info").mkdir(exist_ok=True)
    (repo.folder / ".git/info/attributes").write_text("* filter=evil diff=evil\n")
    return str(script)


def test_the_traps_are_real(repo: Checkout, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    poisoned(repo, mark)
    repo.write("vllm/b.py", "B = 9\n")

    subprocess.run(("git", "status"), cwd=repo.folder, capture_output=True, check=False, timeout=60)

    assert mark.exists()


@plants("a git repository with hooks and odd config")
def test_a_hostile_repository_runs_nothing(repo: Checkout, tmp_path: Path, found: Found) -> None:
    mark = tmp_path / "ran"
    poisoned(repo, mark)

    assert [change.path for change in repo.delta().changes] == ["vllm/a.py"]
    repo.write("vllm/b.py", "B = 9\n")
    assert repo.why() == "vllm/b.py (modified)"
    worktree_commit(repo.folder, RULES)

    assert not mark.exists()
    found("nothing to find: no hook and no command ran", "the one change is seen")


def test_a_partial_clone_fetches_nothing_behind_our_back(repo: Checkout, tmp_path: Path) -> None:
    repo.git("config", "uploadpack.allowFilter", "true")
    part = tmp_path / "part"
    repo.git("clone", "-q", "--bare", "--filter=blob:none", f"file://{repo.folder}", str(part))
    mark = tmp_path / "ran"
    script = tmp_path / "pack.sh"
    script.write_text(f'#!/bin/sh\ntouch {mark}\nexec git-upload-pack "$@"\n')
    script.chmod(0o755)
    config = ("git", "-C", str(part), "config", "remote.origin.uploadpack", str(script))
    subprocess.run(config, check=True, timeout=60)

    with pytest.raises(BadValues, match="partial clone"):
        delta(part, base=repo.base, head=repo.head, rules=RULES)

    assert not mark.exists()


# --- the throw-away commit --------------------------------------------------------------------


def test_the_work_tree_becomes_a_commit_that_nothing_names(repo: Checkout) -> None:
    repo.write("vllm/b.py", "B = 3\n")
    repo.write("vllm/new\n中.py", "N = 1\n")
    repo.write("docs/x.md", "not watched\n")
    (repo.folder / "csrc/k.cu").unlink()
    (repo.folder / "vllm/link.py").symlink_to("b.py")
    index = (repo.folder / ".git/index").read_bytes()
    refs = repo.git("for-each-ref")

    made = worktree_commit(repo.folder, RULES)

    found = delta(repo.folder, base=repo.base, head=made, rules=RULES, check_worktree=False)
    assert {change.path: change.new and change.new.mode for change in found.changes} == {
        "csrc/k.cu": None,
        "vllm/a.py": "100644",
        "vllm/b.py": "100644",
        "vllm/link.py": "120000",
        "vllm/new\n中.py": "100644",
    }
    assert (repo.folder / ".git/index").read_bytes() == index
    assert repo.git("for-each-ref") == refs


def test_the_same_bytes_give_the_same_commit(repo: Checkout) -> None:
    assert worktree_commit(repo.folder, RULES) == repo.head
    repo.write("vllm/b.py", "B = 3\n")

    assert worktree_commit(repo.folder, RULES) == worktree_commit(repo.folder, RULES)


def test_files_that_may_be_dirty_stay_out_of_the_commit(repo: Checkout) -> None:
    repo.write("vllm/b.py", "rewritten by a build\n")

    assert worktree_commit(repo.folder, RULES, ("vllm/b.py",)) == repo.head


def test_a_bare_repository_has_no_work_tree_to_commit(repo: Checkout, tmp_path: Path) -> None:
    repo.git("clone", "-q", "--bare", f"file://{repo.folder}", str(tmp_path / "bare"))

    with pytest.raises(BadValues, match="no work tree"):
        worktree_commit(tmp_path / "bare", RULES)
