"""The readers of a bundle: any bytes are a bundle or an error.

There are three: the operator's, the agent's own, and Python's, which runs the agent out of the zip.
What the first takes the others must take too, and find the same in it: else what was checked is not
what runs. The other way round the agent may be laxer about what it never looks at.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
import zipimport
from collections.abc import Iterator
from pathlib import Path

from deploy import bundle as bundles
from deploy.agent.blobs import ZipBlobs, take
from deploy.agent.main import _agent_digest, _document
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.agent.words import LISTING, BundleError, digest
from deploy.errors import StaleLock
from tests.fuzz.zipped import mutate

__all__ = ["mutate", "one", "seeds"]

TEXTS = (b"V = 1\n", b"data")


def seeds() -> dict[str, bytes]:
    plan = Plan(
        name="x",
        package="p",
        python="/usr/bin/python3",
        site="/s",
        files=tuple(_file(path, text) for path, text in zip(("p/a.py", "p/b.txt"), TEXTS)),
    )
    script = {"mode": "0755", "sha256": hashlib.sha256(TEXTS[0]).hexdigest()}
    inputs = {"schema": 1, "scripts": {"start.sh": script}}
    contents = {hashlib.sha256(text).hexdigest(): text for text in TEXTS}

    def fill(wanted: Iterator[tuple[str, bundles.Sink]]) -> None:
        for sha, sink in wanted:
            sink.write(contents[sha])

    small = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        whole = bundles.pack(
            plan, inputs, fill, Path(folder), listing="files/1\n", scripts={"start.sh": TEXTS[0]}
        )
        with zipfile.ZipFile(whole.path) as full, zipfile.ZipFile(small, "w") as made:
            for info in full.infolist():
                # Sixty sources, a million bytes that no reader looks into, are three too.
                if not info.filename.endswith(".py"):
                    made.writestr(info, full.read(info))
                elif info.filename in ("__main__.py", "agent/__init__.py", "agent/main.py"):
                    made.writestr(info, b"# " + info.filename.encode())
    documents = {"plan": json.dumps(plan.to_json()).encode(), "empty": b"PK\5\6" + bytes(18)}
    return {"whole": small.getvalue(), **documents}


def _file(path: str, text: bytes) -> PlannedFile:
    sha = hashlib.sha256(text).hexdigest()
    want = State(type="file", mode="0644", sha256=sha, size=len(text))
    role = "module" if path.endswith(".py") else "data"
    return PlannedFile(path=path, role=role, want=want, assume=(ABSENT,))


def one(data: bytes, scratch: Path) -> None:
    path = scratch / "fuzz.pyz"
    path.write_bytes(data)
    taken = _by_operator(path)
    # The agent keeps its bundle open, since it is a process that ends; here it would add up.
    free = os.dup(0)
    os.close(free)
    try:
        found = _by_agent(path)
    except BundleError:
        found = None
    finally:
        os.closerange(free, free + 1)
    if taken is not None:
        assert found == _said(taken), "the agent refuses it, or reads something else in it"
        assert _by_python(path) == taken.agent, "Python runs something else from it"
    _plan(data)


def _by_operator(path: Path) -> bundles.Bundle | None:
    try:
        return bundles.read(path)
    except (StaleLock, BundleError):
        return None


def _said(taken: bundles.Bundle) -> tuple[object, ...]:
    listing = bundles.listing_of(taken)
    return taken.plan, digest(dict(taken.inputs)), listing, list(taken.plan.blobs()), taken.agent


def _by_agent(path: Path) -> tuple[object, ...]:
    """What the agent finds: plan, inputs, listing, the blobs that are whole, its own sources."""
    blobs = ZipBlobs(str(path))
    plan = Plan.parse(_document(blobs, "plan.json"))
    inputs = _document(blobs, "inputs.json") if "inputs.json" in blobs.names() else {}
    listing = b"".join(blobs.entry(LISTING)) if LISTING in blobs.names() else b""
    for sha in plan.blobs():
        take(blobs, sha, len)
    sources = _agent_digest(blobs)
    text = listing.decode("utf-8", "surrogateescape")
    return plan, digest(inputs), text, list(plan.blobs()), sources


def _by_python(path: Path) -> str:
    """The digest of the sources that Python's importer of zips finds."""
    zipimport._zip_directory_cache.clear()
    importer = zipimport.zipimporter(str(path))
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if bundles._is_agent(name)]
    return bundles._agent_digest(
        (name.removeprefix("agent/"), importer.get_data(name)) for name in names
    )


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
