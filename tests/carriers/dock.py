"""Parts for tests that need an engine: a base image with a package in it, and bundles for it.

The bases stand on the image that tests/provision.d/docker.sh imports: a full Debian Python 3.11.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy import bundle as bundles
from deploy import manifest as manifests
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.bundle import Bundle
from deploy.carriers.engine import Engine
from deploy.image.archive import Image, Reference, archive_size, stream
from deploy.image.config import Added, Base, config_document
from deploy.image.layer import Entry, Kind, Owner, write_layer
from deploy.manifest import Manifest

DEBIAN = "dcu-test/base:1"
SITE = "/usr/local/lib/python3.11/dist-packages"
PYTHON = "/usr/bin/python3"
EPOCH = 1_700_000_000


def own(name: str) -> Reference:
    """An image name that no other process uses: tests may run in several."""
    return Reference(f"dcu-test/{name}-{os.getpid()}", "1")


# What the vendor's image holds: a package with a sub-package, and bytecode of two interpreters.
VENDOR: dict[str, bytes] = {
    "vllm/__init__.py": b"VERSION = '0.18.1'\n",
    "vllm/envs.py": b"X = 0  # vendor\n",
    "vllm/old.py": b"GONE = True\n",
    "vllm/layers/__init__.py": b"",
    "vllm/layers/utils.py": b"def pick():\n    return 'vendor'\n",
    "vllm/configs/a.json": b"{}\n",
    "vllm/__pycache__/envs.cpython-310.pyc": b"stale",
    "vllm/__pycache__/envs.cpython-311.pyc": b"stale",
    "vllm/__pycache__/old.cpython-311.pyc": b"stale",
    "vllm/__pycache__/__init__.cpython-311.pyc": b"untouched",
    "vllm-0.18.1+das.dtk2604.dist-info/METADATA": b"Name: vllm\nVersion: 0.18.1+das.dtk2604\n",
}
# The submission: two files replaced, one added, one deleted.
EDITS: dict[str, bytes | None] = {
    "vllm/envs.py": b"X = 1  # submission\n",
    "vllm/layers/utils.py": b"def pick():\n    return {'c', 'a', 'b'}\n",
    "vllm/layers/added.py": b"import vllm.envs\n\nY = (1.5, 'text')\n",
    "vllm/old.py": None,
}


MANIFEST = f"""\
schema: 1
name: story
base:
  image: {{image}}
  python: {PYTHON}
  site: {SITE}
  requires: {{{{vllm: 0.18.1}}}}
source: {{{{git: ., base: {"1" * 40}, head: {"2" * 40}, package: vllm}}}}
overlay: {{{{include: ["vllm/**"]}}}}
launch:
  dir: /root/submission
  port: 8001
  ready: 60s
  env: {{{{VLLM_STORY: {{{{value: "it's $HOME", why: shows that nothing is expanded}}}}}}}}
  container: {{{{shm_size: 1M}}}}
model: {{{{path: /srv/model, served_name: story}}}}
bench:
  buckets:
    4-8K:
      dataset: /srv/4-8K.jsonl
      sha256: {hashlib.sha256(b"{}").hexdigest()}
      requests: 3
profile:
  classes: {{{{all: ["*"]}}}}
  tool: /usr/local/bin/hipprof
  library_path: [/opt/tool/lib]
"""


def manifest(image: str) -> Manifest:
    """The story's manifest, on a base image."""
    return manifests.parse(MANIFEST.format(image=image), "story")


def state(data: bytes | str | None, mode: str = "0644") -> State:
    """A file's bytes, a link's text, or nothing, as a plan says it."""
    if data is None:
        return ABSENT
    if isinstance(data, str):
        return State(type="link", link=data)
    return State(type="file", mode=mode, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def plan(
    edits: Mapping[str, bytes | None] = EDITS,
    *,
    before: Mapping[str, bytes | str] = VENDOR,
    **options: Any,
) -> Plan:
    files = tuple(
        PlannedFile(
            path=path,
            role="module" if path.endswith(".py") else "data",
            want=state(data),
            assume=(state(before.get(path)),),
        )
        for path, data in sorted(edits.items())
    )
    values: dict[str, Any] = {
        "name": "story",
        "package": "vllm",
        "python": PYTHON,
        "site": SITE,
        "launch_dir": "/root/submission",
        "requires": {"vllm": "0.18.1"},
        "files": files,
    }
    return Plan(**{**values, **options})


def bundle(
    folder: Path,
    edits: Mapping[str, bytes | None] = EDITS,
    *,
    meaning: Mapping[str, Any] | None = None,
    **options: Any,
) -> Bundle:
    wanted = plan(edits, **options)
    held = [data for data in edits.values() if data is not None]
    contents = {hashlib.sha256(data).hexdigest(): data for data in held}

    def fill(asked: Iterator[tuple[str, bundles.Sink]]) -> None:
        for sha, sink in asked:
            sink.write(contents[sha])

    inputs = {"schema": 1, "head_time": EPOCH, "manifest": dict(meaning or {})}
    return bundles.pack(wanted, inputs, fill, folder)


@contextlib.contextmanager
def base_image(
    engine: Engine,
    tree: Mapping[str, bytes] = VENDOR,
    *,
    entries: tuple[Entry, ...] = (),
    on: str = DEBIAN,
    site: str = SITE,
    config: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """A base image with `tree` in its site, removed again afterwards."""
    below = Base.from_inspect(engine.inspect(on) or {}) if on else Base(diff_ids=())
    below = dataclasses.replace(below, config={**below.config, **(config or {})})
    reference = Reference(f"dcu-test/vendor-{secrets.token_hex(4)}", "1")
    # The folder that the service starts in: a person made it, not the vendor.
    entries = (*entries, Entry(path="root/submission", kind=Kind.FOLDER, mode=0o755))
    files = [Entry(path=f"{site}/{path}".lstrip("/"), data=data) for path, data in tree.items()]
    folders = {"root": Owner(0o700), "tmp": Owner(0o1777)}
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        made = write_layer([*files, *entries], file, epoch=EPOCH, folders=folders)
        file.flush()
        layer = dataclasses.replace(made, path=Path(file.name))
        document = config_document(below, layer.diff_id, Added(note="vendor"), epoch=EPOCH)
        image = Image(reference=reference, base=below, layer=layer, config=document)
        engine.load(stream(image), archive_size(image))
    try:
        yield str(reference)
    finally:
        engine.remove_image(str(reference))
