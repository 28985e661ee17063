"""Bring the rendered scripts and the bundle itself to launch.dir, so that a person can use them.

A script finds the one bundle beside it; an older one of the same name would make that a question,
so it goes. Where this machine departs from the manifest is written beside the scripts, whose bytes
the lock pins. Nothing else in the folder is touched, and nothing is written that is already right.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .blobs import ZipBlobs
from .words import SCRIPTS, Damaged, Unfit, printable

if TYPE_CHECKING:
    from .main import Call

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
OVERRIDES = "overrides.sh"  # read by every script
_PLACES = ("site", "python", "env_script", "launch_dir")


def bring(call: Call, folder: str) -> list[str]:
    """Write what the request carries into `folder`; return the names that were written.

    options: scripts {name: {"mode": "0755", "text": ...}}, bundle {"name", "sha256"}. A bundle that
    is run by hand brings its own scripts, and itself unless it lies there.
    """
    scripts: Mapping[str, Any] = call.request.options.get("scripts") or {}
    bundle: Mapping[str, Any] = call.request.options.get("bundle") or {}
    if not scripts and isinstance(call.blobs, ZipBlobs):
        scripts, bundle = _own(call, call.blobs, folder)
    if not scripts:
        return []
    os.makedirs(folder, exist_ok=True)
    written = []
    for name, row in sorted(scripts.items()):
        data = str(row["text"]).encode()
        mode = int(str(row["mode"]), 8) & 0o755
        if _differs(_checked(folder, name), hashlib.sha256(data).hexdigest(), mode):
            _write(_checked(folder, name), iter([data]), mode)
            written.append(name)
    if _lay_overrides(folder, overrides(call)):
        written.append(OVERRIDES)
    if bundle and _differs(_checked(folder, bundle["name"]), bundle["sha256"], 0o644):
        _write_bundle(call, _checked(folder, bundle["name"]), str(bundle["sha256"]))
        written.append(str(bundle["name"]))
    if bundle:
        _drop_older(folder, str(bundle["name"]), call.plan.name)
    return written


def overrides(call: Call) -> dict[str, str]:
    """Return the places where this call departs from the plan: hosts.yaml's, or flags typed."""
    said = {place: str(getattr(call.request, place)) for place in _PLACES}
    return {place: path for place, path in said.items() if path != getattr(call.plan, place)}


def bundle_in(call: Call, folder: str) -> str:
    """Return the name of this call's own bundle where it lies in `folder`, else "".

    Another one may lie beside it: whoever runs a script there names the one that is meant.
    """
    name = str((call.request.options.get("bundle") or {}).get("name") or "")
    if not name and isinstance(call.blobs, ZipBlobs):
        name = _name_in(call, call.blobs, folder)
    return name if name and os.path.isfile(_checked(folder, name)) else ""


def _name_in(call: Call, blobs: ZipBlobs, folder: str) -> str:
    """The running bundle's own name where it lies in `folder`, else the one it is brought by."""
    if os.path.realpath(os.path.dirname(blobs.path)) == os.path.realpath(folder):
        return os.path.basename(blobs.path)
    return f"{call.plan.name}-{_sha256_of(blobs)[:12]}.pyz"


def _sha256_of(blobs: ZipBlobs) -> str:
    total = hashlib.sha256()
    for chunk in blobs.whole():
        total.update(chunk)
    return total.hexdigest()


def _lay_overrides(folder: str, found: Mapping[str, str]) -> bool:
    """Write what departs as the scripts' variables, or take away what an earlier call wrote."""
    path = os.path.join(folder, OVERRIDES)
    if not found:
        if os.path.lexists(path):
            os.unlink(path)
        return False
    lines = [f"own_{place}={shlex.quote(value)}\n" for place, value in sorted(found.items())]
    data = "".join(["# Where this machine departs from the manifest.\n", *lines]).encode()
    if not _differs(path, hashlib.sha256(data).hexdigest(), 0o644):
        return False
    _write(path, iter([data]), 0o644)
    return True


def _own(
    call: Call, blobs: ZipBlobs, folder: str
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The scripts of the bundle that is running, and that bundle where it lies elsewhere."""
    found = {}
    for name, row in sorted(call.request.scripts.items()):
        data = b"".join(blobs.entry(SCRIPTS + name))
        if hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise Damaged(
                f"the bundle's script {printable(name)} is damaged",
                why=f"its sha256 is not {row['sha256']}",
                fix="make the bundle again with `./inv bundle`, or upload it again",
            )
        found[name] = {"mode": str(row["mode"]), "text": data.decode()}
    if not found or os.path.realpath(os.path.dirname(blobs.path)) == os.path.realpath(folder):
        return found, {}
    return found, {"name": _name_in(call, blobs, folder), "sha256": _sha256_of(blobs)}


def _checked(folder: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Unfit(
            f"{printable(name)} is no name of a script",
            why="a request may only write plain files into launch.dir",
            fix="make the request with `./inv serve.start`",
        )
    return os.path.join(folder, name)


def _differs(path: str, sha256: str, mode: int) -> bool:
    try:
        if os.lstat(path).st_mode & 0o7777 != mode or os.path.islink(path):
            return True
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest() != sha256
    except OSError:
        return True


def _write_bundle(call: Call, path: str, sha256: str) -> None:
    total = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        if isinstance(call.blobs, ZipBlobs):
            chunks = call.blobs.whole()
        else:
            call.blobs.prepare([sha256])
            chunks = call.blobs.chunks(sha256)
        for chunk in chunks:
            total.update(chunk)
            yield chunk
        if total.hexdigest() != sha256:
            raise Damaged(
                "the bundle that came is not the one that was asked for",
                why=f"its sha256 is {total.hexdigest()}, asked was {sha256}",
                fix="make it again with `./inv bundle`",
            )

    _write(path, hashed(), 0o644)


def _write(path: str, chunks: Iterator[bytes], mode: int) -> None:
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            os.fchmod(file.fileno(), mode)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _drop_older(folder: str, keep: str, name: str) -> None:
    # An image brings its bundle by a name without digest; it would be a second one beside ours.
    older = re.compile(r"bundle\.pyz|" + re.escape(name) + r"-[0-9a-f]{12}\.pyz")
    for other in os.listdir(folder):
        if other != keep and older.fullmatch(other):
            os.unlink(os.path.join(folder, other))
