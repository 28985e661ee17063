"""A wheel as the base of a manifest: fetched by its digest, unpacked, made a commit.

What a wheel holds is third-party data until its sha256 was compared, and is unpacked with care even
then: names that leave the folder, links and names that stand twice are refused.
"""

from __future__ import annotations

import base64
import calendar
import fcntl
import hashlib
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from deploy.agent.words import printable
from deploy.errors import BadValues, StaleLock, Unfit, Unreachable
from deploy.git import Git, GitFailed, commit_head, fast_import, init_bare, quoted, write_blob

__all__ = ["Wheel", "WheelSpec", "base_commit", "fetch", "pack", "unpack"]

PIECE = 1 << 20
THREADS = 2  # inflating, hashing and writing leave the interpreter's lock alone
PIP_SECONDS = 3600
# What zipfile and zlib raise on bytes that are no zip, or no longer the one they were.
DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError),
    *(ValueError, IndexError, OverflowError, RuntimeError),
)
MOST_FILES = 100_000
MOST_BYTES = 16 << 30
EARLIEST = calendar.timegm((1980, 1, 1, 0, 0, 0))  # the oldest time a zip can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSpec:
    """A wheel as a manifest pins it. `python` is the version that the file must be made for."""

    name: str
    version: str
    sha256: str
    platform: str
    python: str = "3.10"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on disk whose bytes had this sha256 when they were last looked at."""

    path: Path
    sha256: str


def fetch(spec: WheelSpec, cache: Path, *, made_from: Path | None = None) -> Wheel:
    """Return the wheel, from the cache if it is there, else through pip (or packed from a folder).

    The cached file is hashed on every use, and a folder is packed on every use: a cached wheel must
    not hide that somebody edited its source. Raises StaleLock when either is not what the manifest
    pins, Unreachable when pip cannot get it.
    """
    path = cache / "wheels" / f"{spec.sha256}.whl"
    cached = path.exists()
    if cached:
        _check(path, spec, f"delete {path}; it is fetched again")
    if cached and made_from is None:
        return Wheel(path, spec.sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch.") as folder:
        found = Path(folder, "made.whl")
        if made_from is not None:
            pack(made_from, found)
        else:
            found = _download(spec, Path(folder))
        _check(found, spec, f"correct the wheel's sha256 in the manifest: {spec.name}")
        if not cached:
            os.replace(found, path)
    return Wheel(path, spec.sha256)


def _check(path: Path, spec: WheelSpec, fix: str) -> None:
    if (found := _sha256(path)) != spec.sha256:
        raise StaleLock(
            f"the wheel {spec.name} {spec.version} is not the one that was pinned",
            why=f"{path} has the sha256 {found}, pinned is {spec.sha256}",
            fix=fix,
        )


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            sha.update(piece)
    return sha.hexdigest()


def _download(spec: WheelSpec, folder: Path) -> Path:
    """Let pip fetch the file: it knows the user's index, mirror, proxy and certificates."""
    asked = folder / "asked.txt"
    asked.write_text(f"{spec.name}=={spec.version} --hash=sha256:{spec.sha256}\n", encoding="ascii")
    argv = (
        *(sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--require-hashes", "--implementation", "cp", "--python-version", spec.python),
        *("--platform", spec.platform, "--disable-pip-version-check", "--no-input"),
        *("--progress-bar", "off", "--quiet", "--dest", str(folder), "-r", str(asked)),
    )
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PIP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise _unreachable(spec, f"pip gave no answer in {PIP_SECONDS} s") from err
    found = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    raise _pip_failed(spec, done.stderr)


def _pip_failed(spec: WheelSpec, stderr: str) -> Exception:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    why = printable(next((x for x in lines if x.startswith("ERROR:")), "".join(lines[-1:])))
    if "No module named pip" in stderr:
        return Unfit(
            f"{sys.executable} has no pip to fetch the wheel with",
            why=why,
            fix="start through ./inv, whose .venv has pip",
        )
    if "DO NOT MATCH THE HASHES" in stderr:
        return StaleLock(
            f"the index has another {spec.name} {spec.version} than the manifest pins",
            why=f"no file of it for {spec.platform} has the sha256 {spec.sha256}",
            fix="compare the sha256 in the manifest with the one that the index shows",
        )
    return _unreachable(spec, why)


def _unreachable(spec: WheelSpec, why: str) -> Unreachable:
    return Unreachable(
        f"the wheel {spec.name} {spec.version} for {spec.platform} could not be fetched",
        why=why or "pip gave no reason",
        fix="check network and pip's index setting, or copy the file to "
        f"out/cache/wheels/{spec.sha256}.whl",
    )


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel. `mode` holds the permission bits as the wheel gives them."""

    path: str
    mode: int
    info: zipfile.ZipInfo


@contextmanager
def _opened(wheel: Wheel) -> Iterator[tuple[zipfile.ZipFile, list[Member]]]:
    """Open a wheel and return its files, sorted; raise StaleLock on any that must not be there."""
    try:
        archive = zipfile.ZipFile(wheel.path)
    except DAMAGE as err:
        raise _bad_wheel(wheel.path, [str(err)]) from err
    with archive:
        yield archive, _members(archive, wheel.path)


def _pieces(archive: zipfile.ZipFile, member: Member) -> Iterator[bytes]:
    """Yield the content of one file; raise StaleLock when it is damaged."""
    try:
        with archive.open(member.info) as source:
            while piece := source.read(PIECE):
                yield piece
    except DAMAGE as err:
        raise _bad_wheel(Path(str(archive.filename)), [f"{member.path!r}: {err}"]) from err


def _members(archive: zipfile.ZipFile, path: Path) -> list[Member]:
    infos = [info for info in archive.infolist() if not info.filename.endswith("/")]
    faults = [f"{i.filename!r}: {why}" for i in infos for why in _faults(i)]
    names = [info.filename for info in infos]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    faults += [f"{n!r}: it stands there twice" for n in twice]
    both = sorted(_parents(names).intersection(names))
    faults += [f"{n!r}: it is also the folder of a file" for n in both]
    if len(names) > MOST_FILES or sum(i.file_size for i in infos) > MOST_BYTES:
        faults.append(f"more than {MOST_FILES} files or {MOST_BYTES} bytes")
    if faults:
        raise _bad_wheel(path, faults)
    members = [Member(i.filename, (i.external_attr >> 16) & 0o777 or 0o644, i) for i in infos]
    return sorted(members, key=lambda member: member.path.encode())


def _faults(info: zipfile.ZipInfo) -> Iterator[str]:
    name, parts = info.filename, info.filename.split("/")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in parts[0]:
        yield "the name is absolute or leaves its folder"
    # zipfile cuts a name at its first NUL, so what is checked would not be what another tool sees.
    if not name.isprintable() or info.orig_filename != name:
        yield "the name holds a control character"
    if any(len(os.fsencode(part)) > 255 for part in parts):
        yield "the name is longer than 255 bytes"
    if parts[0].endswith(".data"):
        yield "it installs a file outside of site-packages, which is not supported"
    if kind not in (0, stat.S_IFREG):
        yield "it is not a regular file"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield f"it is packed by the method {info.compress_type}, which no wheel uses"
    if info.flag_bits & 1:
        yield "it is encrypted"


def _parents(names: list[str]) -> set[str]:
    """Return every folder of the files."""
    return {n.rsplit("/", k)[0] for n in names for k in range(1, n.count("/") + 1)}


def _bad_wheel(path: Path, faults: list[str]) -> StaleLock:
    shown = "; ".join(printable(fault) for fault in faults[:20])
    more = f" (and {len(faults) - 20} more)" if len(faults) > 20 else ""
    return StaleLock(
        f"the wheel {path} cannot be used",
        why=shown + more,
        fix="fetch it from a source that you trust, and pin the sha256 of that one",
    )


@contextmanager
def files(wheel: Wheel) -> Iterator[list[tuple[str, int, int, Callable[[], IO[bytes]]]]]:
    """Give path, permission bits, size and opener of every file, sorted; inside the block only.

    Raises:
        StaleLock: the wheel holds what must not be there.
    """
    with _opened(wheel) as (archive, members):
        yield [(m.path, m.mode, m.info.file_size, partial(archive.open, m.info)) for m in members]


def unpack(wheel: Wheel, dest: Path) -> None:
    """Unpack a wheel into a folder that does not exist yet, each file with the wheel's own mode.

    The folder appears whole or not at all.
    """
    if dest.exists():
        raise FileExistsError(dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    try:
        with _opened(wheel) as (archive, members):
            names = [member.path for member in members]
            for folder in sorted(_parents(names)):
                made = _below(staged, folder)
                made.mkdir()
                made.chmod(0o755)  # mkdir's own mode obeys the umask
            with ThreadPoolExecutor(max_workers=THREADS) as pool:
                # list: it waits for every write and raises what any of them raised.
                list(pool.map(lambda m: _write(archive, m, _below(staged, m.path)), members))
        staged.chmod(0o755)
        staged.rename(dest)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _below(top: Path, path: str) -> Path:
    """Join by bytes: a name is UTF-8 on disk whatever the locale of this process is."""
    return top / os.fsdecode(path.encode())


def _write(archive: zipfile.ZipFile, member: Member, path: Path) -> None:
    with path.open("xb") as out:
        out.writelines(_pieces(archive, member))
        os.fchmod(out.fileno(), member.mode)


def base_commit(wheel: Wheel, repo: Path) -> str:
    """Return the commit that holds exactly the wheel's files, made on first use in our own `repo`.

    The id depends on the wheel's bytes alone. A cached repository is looked through before it is
    believed; one that is not whole is made again.
    """
    with _locked(repo), _opened(wheel) as (archive, members):
        if (found := _cached(repo, _ref(wheel), members)) is not None:
            return found
        shutil.rmtree(repo, ignore_errors=True)
        staged = repo.with_name(f"{repo.name}.new")
        shutil.rmtree(staged, ignore_errors=True)
        made = _import(init_bare(staged), archive, members, wheel)
        staged.rename(repo)
        return made


@contextmanager
def _locked(repo: Path) -> Iterator[None]:
    repo.parent.mkdir(parents=True, exist_ok=True)
    with repo.with_name(f"{repo.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it goes with the process, however that ends
        yield


def _cached(repo: Path, ref: str, members: list[Member]) -> str | None:
    """Return the commit if the repository still holds every file of the wheel by name and size."""
    if not (repo / "HEAD").is_file():
        return None
    git = Git(repo, own=True)
    try:
        commit = git.run("rev-parse", "--verify", f"{ref}^{{commit}}").stdout.decode().strip()
        rows = git.run("ls-tree", "-r", "-z", "--full-tree", "--long", commit).stdout
    except GitFailed:
        return None
    want = [f"{_git_mode(m)} blob {m.info.file_size}\t{m.path}" for m in members]
    found = [_without_oid(row) for row in rows.decode("utf-8", "replace").split("\0")[:-1]]
    return commit if sorted(want) == sorted(found) else None


def _without_oid(row: str) -> str:
    facts, _, path = row.partition("\t")
    mode, kind, _, size = facts.split()
    return f"{mode} {kind} {size}\t{path}"


def _git_mode(member: Member) -> str:
    return "100755" if member.mode & 0o100 else "100644"


def _import(git: Git, archive: zipfile.ZipFile, members: list[Member], wheel: Wheel) -> str:
    def blob(member: Member) -> str:
        return write_blob(git, _pieces(archive, member), member.info.file_size)

    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        oids = list(pool.map(blob, members))
    newest = max((m.info.date_time for m in members), default=(1980, 1, 1, 0, 0, 0))
    time = max(EARLIEST, calendar.timegm(newest))
    stream = [commit_head(_ref(wheel), message=f"Import wheel sha256:{wheel.sha256}\n", time=time)]
    for member, oid in zip(members, oids, strict=True):
        row = (_git_mode(member).encode(), oid.encode(), quoted(member.path.encode()))
        stream.append(b"M %s %s %s\n" % row)
    return fast_import(git, stream)


def _ref(wheel: Wheel) -> str:
    return f"refs/bundle/wheel-{wheel.sha256}"


def pack(folder: Path, path: Path) -> None:
    """Make a wheel of a folder, the same bytes everywhere: for bases that need no network.

    A RECORD is added to the one `.dist-info` in it. Times are fixed, only the execute bit of a
    file's mode counts, and nothing is compressed (zlib's output differs between versions).
    """
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    # Whoever looks at the files with Python leaves bytecode beside them.
    files = {name: p for name, p in found.items() if "__pycache__" not in name.split("/")}
    infos = sorted({n.split("/")[0] for n in files if n.split("/")[0].endswith(".dist-info")})
    if len(infos) != 1:
        raise BadValues(
            f"{folder} cannot be made a wheel",
            why=f"it must hold one .dist-info folder, found {len(infos)}",
            fix="add NAME-VERSION.dist-info with METADATA and WHEEL",
        )
    record = f"{infos[0]}/RECORD"
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            data = files[name].read_bytes()
            _add(archive, name, data, executable=bool(files[name].stat().st_mode & 0o100))
            sha = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            rows.append(f"{name},sha256={sha},{len(data)}\n")
        _add(archive, record, "".join([*rows, f"{record},,\n"]).encode(), executable=False)


def _add(archive: zipfile.ZipFile, name: str, data: bytes, *, executable: bool) -> None:
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.create_system = 3  # Unix: the upper half of external_attr is a mode
    info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    archive.writestr(info, data)
