"""The one way git is called: plumbing, in an environment where a repository cannot run code.

`Git` runs a command, `Objects` reads objects from one long `cat-file`, `fast_import` writes them.
A user's repository is only read, with the user's own configuration (it says which folders are
trusted); a repository of ours sees no configuration but its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO

from deploy.agent.words import printable
from deploy.errors import BadValues, BundleError, StaleLock, Unfit
from deploy.values import Writer

__all__ = ["Commit", "Entry", "Git", "GitFailed", "Objects", "fast_import", "is_commit_id"]

OLDEST = (2, 30)
SECONDS = 600  # no call of ours takes a tenth of this; a hung disk must not hang the caller
PIECE = 1 << 20
LINK, GITLINK, FOLDER = "120000", "160000", "040000"

# What a repository's own configuration could use to run a program, to reach the network or to
# change what is printed. These win over every configuration file.
_SAFE = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.untrackedCache=false",
    "core.splitIndex=false",
    "core.pager=cat",
    "core.sshCommand=false",
    "core.alternateRefsCommand=true",
    "protocol.allow=never",
    "submodule.recurse=false",
    "diff.relative=false",
    "gc.auto=0",
    "maintenance.auto=false",
)


class GitFailed(BundleError):
    """A git command ended with an error that its caller did not expect."""

    exit = BadValues.exit


def is_commit_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


@dataclass(frozen=True, slots=True)
class Git:
    """How to call git on one repository. `own` is True for a bare repository made by us."""

    folder: Path
    own: bool = False

    def run(
        self,
        *args: str,
        stdin: bytes = b"",
        ok: Sequence[int] = (0,),
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one command to its end; raise GitFailed when it returns none of the codes `ok`."""
        argv = self.argv(*args)
        try:
            done = subprocess.run(
                argv,
                input=stdin,
                capture_output=True,
                env=self.env() | (env or {}),
                timeout=SECONDS,
                check=False,
            )
        except FileNotFoundError as err:
            raise _no_git(err) from err
        if done.returncode not in ok:
            raise self.failure(args, done.stderr)
        return done

    def start(self, *args: str, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self.argv(*args),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=self.env(),
                bufsize=PIECE,
            )
        except FileNotFoundError as err:
            raise _no_git(err) from err

    def argv(self, *args: str) -> tuple[str, ...]:
        options = [word for setting in _SAFE for word in ("-c", setting)]
        # A named git dir skips git's ownership check: right for our own cache, never for others.
        where = ("--git-dir", str(self.folder)) if self.own else ("-C", str(self.folder))
        return ("git", "--no-pager", *options, *where, *args)

    def env(self) -> dict[str, str]:
        """The environment of every call: no variable of git's but those that locate configuration.

        Replace objects, grafts and lazy fetches of a partial clone are switched off: all three put
        other bytes under an id than its own, or go to the network.
        """
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        if self.own:
            kept |= {"HOME": "/dev/null", "XDG_CONFIG_HOME": "/dev/null"}
            kept |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
        else:
            kept |= {k: v for k, v in os.environ.items() if k.startswith("GIT_CONFIG")}
            kept["GIT_CEILING_DIRECTORIES"] = str(Path(os.path.realpath(self.folder)).parent)
        return kept | {
            "LC_ALL": "C",
            "TZ": "UTC",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_GRAFT_FILE": "/dev/null",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_OPTIONAL_LOCKS": "0",
        }

    def failure(self, args: Sequence[str], stderr: bytes) -> BundleError:
        """Turn git's last words into an error that says how to go on."""
        said = stderr.decode("utf-8", "replace").strip() or "it said nothing"
        if "dubious ownership" in said:
            return _dubious(self.folder)
        if "not a git repository" in said:
            return BadValues(
                f"{self.folder} is not a git repository",
                why="there is neither a .git nor a bare repository in that very folder",
                fix="name the top folder of the checkout, or the bare repository",
            )
        if "promisor remote" in said:
            return BadValues(
                f"{self.folder} is a partial clone that lacks an object",
                why=printable(said.splitlines()[-1]),
                fix="make a full clone (without --filter): nothing is fetched while a plan is made",
            )
        if (found := self.version()) < OLDEST:
            return _old_git(found)
        return GitFailed(
            f"git {args[0]} failed in {self.folder}",
            why=printable(said.splitlines()[-1]),
            fix="run `git fsck` in that repository, and fetch again what it finds broken",
        )

    def version(self) -> tuple[int, ...]:
        try:
            said = subprocess.run(("git", "version"), capture_output=True, timeout=60, check=False)
        except FileNotFoundError as err:
            raise _no_git(err) from err
        found = re.search(rb"(\d+)\.(\d+)", said.stdout)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def require(self) -> None:
        """Raise Unfit when this machine's git is missing or too old."""
        if (found := self.version()) < OLDEST:
            raise _old_git(found)

    def objects(self) -> Objects:
        return Objects(self)


def _no_git(err: Exception) -> Unfit:
    return Unfit("git is not installed", why=str(err), fix="run `apt-get install git`")


def _old_git(found: tuple[int, ...]) -> Unfit:
    return Unfit(
        "the git of this machine is too old",
        why=f"found {found[0]}.{found[1]}, at least {OLDEST[0]}.{OLDEST[1]} is needed",
        fix="install a newer git and put it first in PATH",
    )


def _dubious(folder: Path) -> BadValues:
    """Git trusts a repository only when the folder, the .git and the git dir are the caller's."""
    real = Path(os.path.realpath(folder))
    suspects = [path for path in (real, real / ".git") if path.exists()]
    owners = {path: path.stat().st_uid for path in suspects}
    other = next((path for path in suspects if owners[path] != os.geteuid()), real)
    return BadValues(
        f"git does not trust the repository {real}",
        why=f"{other} belongs to uid {owners.get(other, -1)}, and you are uid {os.geteuid()}",
        fix=f"if you trust it: git config --global --add safe.directory {real}",
    )


@dataclass(frozen=True, slots=True)
class Commit:
    """`time` is the committer's, in seconds since the epoch."""

    id: str
    tree: str
    time: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a tree object; `name` holds the bytes as they are in git."""

    mode: str
    name: bytes
    oid: str


class Objects(AbstractContextManager["Objects"]):
    """Reads objects through one `git cat-file --batch`; every content is checked against its id."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        try:
            self._process = git.start("cat-file", "--batch", stderr=self._stderr)
        except BaseException:
            self._stderr.close()
            raise
        self._timer = threading.Timer(SECONDS, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        # An answer may be half read; the process holds nothing that needs a clean end.
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with _ignoring_broken_pipe():
                    stream.close()
        self._process.wait()
        self._stderr.close()

    def stream(self, name: str, kind: str = "blob") -> Iterator[bytes]:
        """Yield the content of one object in pieces of at most 1 MiB.

        Raises BadValues when it is missing, of another kind, or not what its id says. Read it to
        its end before the next object is asked for.
        """
        oid, found, size = self._ask(name)
        if found != kind:
            self._drain(size)
            raise BadValues(
                f"{name} in {self._git.folder} is not a {kind}",
                why=f"git says that it is a {found}",
                fix="name a commit by its 40 hex digits",
            )
        sha = hashlib.sha1(b"%s %d\0" % (kind.encode(), size), usedforsecurity=False)
        for piece in self._content(size):
            sha.update(piece)
            yield piece
        if sha.hexdigest() != oid:
            raise StaleLock(
                f"object {oid} in {self._git.folder} is damaged",
                why=f"its content has the id {sha.hexdigest()}",
                fix="run `git fsck` there, remove the damaged object and fetch it again",
            )

    def read(self, name: str, kind: str = "blob") -> bytes:
        return b"".join(self.stream(name, kind))

    def copy(self, oid: str, out: Writer) -> int:
        """Copy one blob into an open file; return its size."""
        return sum(out.write(piece) for piece in self.stream(oid))

    def commit(self, name: str) -> Commit | None:
        """Return the commit of that id, or `HEAD`; None when the repository does not hold it."""
        try:
            raw = self.read(name, "commit")
        except Missing:
            return None
        head = raw.split(b"\n\n", 1)[0]
        tree = re.match(rb"tree ([0-9a-f]{40})\n", head)
        time = re.search(rb"^committer .* (\d+) [+-]\d{4}$", head, re.MULTILINE)
        if tree is None or time is None:
            raise BadValues(
                f"commit {name} in {self._git.folder} is malformed",
                why="it has no tree or no committer date",
                fix="run `git fsck` there",
            )
        oid = hashlib.sha1(b"commit %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()
        return Commit(oid, tree[1].decode(), int(time[1]))

    def tree(self, oid: str) -> Iterator[Entry]:
        raw = self.read(oid, "tree")
        at = 0
        while at < len(raw):
            end = raw.index(b"\0", at)
            mode, _, name = raw[at:end].partition(b" ")
            yield Entry(mode.decode().rjust(6, "0"), name, raw[end + 1 : end + 21].hex())
            at = end + 21

    def files(self, tree: str, below: bytes = b"") -> Iterator[Entry]:
        """Yield every file, link and submodule below a tree; the names are whole paths."""
        for entry in self.tree(tree):
            path = below + entry.name
            if entry.mode == FOLDER:
                yield from self.files(entry.oid, path + b"/")
            else:
                yield Entry(entry.mode, path, entry.oid)

    def _ask(self, name: str) -> tuple[str, str, int]:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            pipe.write(name.encode() + b"\n")
            pipe.flush()
        except BrokenPipeError as err:
            raise self._died() from err
        line = answers.readline()
        if line.endswith((b" missing\n", b" ambiguous\n")):
            raise Missing(
                f"{name} is not in {self._git.folder}",
                why="the repository does not hold this object",
                fix="fetch it; a shallow or partial clone holds only a part of the history",
            )
        parts = line.split()
        if len(parts) != 3:
            raise self._died()
        return parts[0].decode(), parts[1].decode(), int(parts[2])

    def _content(self, size: int) -> Iterator[bytes]:
        answers = self._process.stdout
        assert answers is not None
        left = size
        while left:
            piece = answers.read(min(left, PIECE))
            if not piece:
                raise self._died()
            left -= len(piece)
            yield piece
        answers.read(1)  # the newline behind each content

    def _drain(self, size: int) -> None:
        for _ in self._content(size):
            pass

    def _died(self) -> BundleError:
        self._process.wait(timeout=60)
        self._stderr.seek(0)
        return self._git.failure(("cat-file",), self._stderr.read())


class Missing(BadValues):
    """An object is not in the repository."""


@contextmanager
def _ignoring_broken_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        pass


def init_bare(folder: Path) -> Git:
    """Make a bare repository of ours: no template, so no hook and no setting from elsewhere."""
    git = Git(folder, own=True)
    git.require()
    folder.mkdir(parents=True)
    git.run("init", "--quiet", "--bare", "--template=", "--object-format=sha1", "-b", "main")
    return git


def fast_import(git: Git, pieces: Iterable[bytes]) -> str:
    """Feed one commit to `git fast-import` and return its id; nothing is kept if it fails.

    The stream must mark its commit `:1`. Nothing is compressed or made into a delta: the objects
    are read a few times and then thrown away with the cache, and packing would be the slow part.
    """
    with tempfile.TemporaryFile() as stderr:
        process = git.start(
            *("-c", "core.compression=0", "-c", "pack.compression=0", "-c", "core.fsync=none"),
            *("fast-import", "--quiet", "--done", "--force", "--depth=0"),
            *("--date-format=raw", "--big-file-threshold=1g"),
            stderr=stderr,
        )
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with _ignoring_broken_pipe():
                for piece in pieces:
                    process.stdin.write(piece)
                process.stdin.write(b"get-mark :1\ndone\n")
                process.stdin.close()
            answer = process.stdout.read().decode().strip()
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with _ignoring_broken_pipe():
                        stream.close()
        if code != 0 or not is_commit_id(answer):
            stderr.seek(0)
            raise git.failure(("fast-import",), stderr.read())
        return answer


def write_blob(git: Git, pieces: Iterable[bytes], size: int) -> str:
    """Write one blob of `size` bytes into a repository of ours and return its id.

    It becomes a loose object, stored without compression. fast-import hashes all that it writes
    three times, which for a wheel of 256 MB is most of the time.
    """
    sha = hashlib.sha1(usedforsecurity=False)
    squeeze = zlib.compressobj(0)
    handle, name = tempfile.mkstemp(dir=git.folder / "objects", prefix="tmp_obj_")
    with open(handle, "wb") as out:
        for piece in chain((b"blob %d\0" % size,), pieces):
            sha.update(piece)
            out.write(squeeze.compress(piece))
        out.write(squeeze.flush())
        os.fchmod(handle, 0o444)
    oid = sha.hexdigest()
    final = git.folder / "objects" / oid[:2] / oid[2:]
    final.parent.mkdir(exist_ok=True)
    os.replace(name, final)
    return oid


def quoted(path: bytes) -> bytes:
    """Return a path as fast-import reads it, whatever bytes it holds."""
    plain = bytes(c for c in range(0x20, 0x7F) if c not in b'"\\')
    return b'"' + b"".join(bytes((c,)) if c in plain else b"\\%03o" % c for c in path) + b'"'


def commit_head(ref: str, *, message: str, time: int, parent: str = "") -> bytes:
    """Open a commit in a fast-import stream: the same author, zone and encoding everywhere."""
    who = f"dcu-bundle <dcu-bundle@invalid> {time} +0000"
    text = message.encode()
    lines = [f"commit {ref}", "mark :1", f"author {who}", f"committer {who}", f"data {len(text)}"]
    head = "\n".join(lines).encode() + b"\n" + text + b"\n"
    return head + (f"from {parent}\n".encode() if parent else b"")
