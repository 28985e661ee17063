"""The readers of a bundle, the operator's and the agent's: any bytes are a bundle or an error.

What the operator's side takes, the agent takes too; the other way round the agent may be laxer
about what it never looks at.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from deploy import bundle as bundles
from deploy.agent.blobs import ZipBlobs
from deploy.agent.main import _document
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.agent.words import BundleError
from deploy.errors import StaleLock

TEXT = b"V = 1\n"


def seeds() -> dict[str, bytes]:
    sha = hashlib.sha256(TEXT).hexdigest()
    want = State(type="file", mode="0644", sha256=sha, size=len(TEXT))
    plan = Plan(
        name="x",
        package="p",
        python="/usr/bin/python3",
        site="/s",
        files=(PlannedFile(path="p/a.py", role="module", want=want, assume=(ABSENT,)),),
    )

    def fill(wanted: Iterator[tuple[str, bundles.Sink]]) -> None:
        for _, sink in wanted:
            sink.write(TEXT)

    small = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        whole = bundles.pack(plan, {"schema": 1}, fill, Path(folder), listing="files/1\n")
        with zipfile.ZipFile(whole.path) as full, zipfile.ZipFile(small, "w") as made:
            for info in full.infolist():
                # The agent's sources are a million bytes that no reader looks into.
                made.writestr(info, b"" if info.filename.endswith(".py") else full.read(info))
    documents = {"plan": json.dumps(plan.to_json()).encode(), "empty": b"PK\5\6" + bytes(18)}
    return {"whole": small.getvalue(), **documents}


def one(data: bytes, scratch: Path) -> None:
    path = scratch / "fuzz.pyz"
    path.write_bytes(data)
    taken = _by_operator(path)
    before = _open_files()
    try:
        _by_agent(path)
    except BundleError:
        assert taken is None, "the operator's side took what the agent refuses"
    for fd in _open_files() - before:
        with contextlib.suppress(OSError):  # one of them was that of the listing itself
            os.close(fd)  # the agent is a process of its own and ends
    _plan(data)


def _open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _by_agent(path: Path) -> None:
    blobs = ZipBlobs(str(path))
    plan = Plan.parse(_document(blobs, "plan.json"))
    for sha in plan.blobs():
        if blobs.has(sha):
            b"".join(blobs.chunks(sha))


def _by_operator(path: Path) -> bundles.Bundle | None:
    try:
        return bundles.read(path)
    except (StaleLock, BundleError):
        return None


def _plan(data: bytes) -> None:
    """The plan alone, since few mutations of a zip keep its checksums."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(raw, dict):
        return
    try:
        plan = Plan.parse(raw)
    except BundleError:
        return
    again = Plan.parse(json.loads(json.dumps(plan.to_json())))
    assert (again.digest, again.payload, again.tree) == (plan.digest, plan.payload, plan.tree)
    for entry in plan.files:
        parts = entry.path.split("/")
        assert not {"", ".", ".."} & set(parts)
        assert "\0" not in entry.path
