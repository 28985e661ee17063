"""An image as one tar that both kinds of engine load: `docker save` format and OCI layout at once.

A thin archive leaves the base's layers out, so that loading costs what is ours and not the sixteen
gigabytes beneath it; a full one holds everything and needs no engine.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deploy.agent.words import canonical

from .config import LAYER_TYPE, MANIFEST_TYPE, Base, Descriptor, manifest_document, sha256
from .layer import Layer

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_RECORD = 10240  # tar pads its end to this
_SLICE = 1 << 20
_LARGEST = 4 << 20  # bytes of a manifest or config: what registries take at most


@dataclass(frozen=True, slots=True)
class Reference:
    """An image name with its tag, as a person types it: `[HOST[:PORT]/]NAME[:TAG][@DIGEST]`."""

    name: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Reference:
        text = text.partition("@")[0]
        name, colon, tag = text.rpartition(":")
        if not colon or "/" in tag:  # the colon belongs to a port
            return cls(text, "latest")
        return cls(name, tag)

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"

    @property
    def full(self) -> str:
        """The name with its registry spelt out, as a content store keeps it."""
        first, slash, _ = self.name.partition("/")
        if slash and ("." in first or ":" in first or first == "localhost"):
            return str(self)
        return f"docker.io/{self.name if slash else 'library/' + self.name}:{self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One assembled image, before any engine has seen it.

    `base_layers` gives the files of the base's own blobs, by digest; an archive without them is
    thin. `config` is the document's bytes, and its digest the id on a classic store.
    """

    reference: Reference
    base: Base
    layer: Layer
    config: bytes
    base_layers: Mapping[str, Path] = field(default_factory=dict)

    @property
    def config_id(self) -> str:
        return "sha256:" + sha256(self.config)

    @property
    def manifest(self) -> bytes:
        """The OCI manifest; without the base's descriptors its sizes are nominal (`complete`)."""
        below = self.base.layers or tuple(
            Descriptor(digest=diff_id, size=0) for diff_id in self.base.diff_ids
        )
        return manifest_document(
            self.config, [*below, Descriptor(digest=self.layer.diff_id, size=self.layer.size)]
        )

    @property
    def complete(self) -> bool:
        """True when the base's blobs are known, and so the manifest's digest means something."""
        return len(self.base.layers) == len(self.base.diff_ids)

    @property
    def manifest_id(self) -> str:
        return "sha256:" + sha256(self.manifest)


def index_document(image: Image) -> bytes:
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [
                {
                    "mediaType": MANIFEST_TYPE,
                    "digest": image.manifest_id,
                    "size": len(image.manifest),
                    "annotations": {
                        "io.containerd.image.name": image.reference.full,
                        "org.opencontainers.image.ref.name": image.reference.tag,
                    },
                }
            ],
        }
    )


def _save_document(image: Image) -> bytes:
    """The `docker save` list. It names base layers by diff_id, whatever the blobs are called."""
    digests = [*image.base.diff_ids, image.layer.diff_id]
    return canonical(
        [
            {
                "Config": _blob(image.config_id),
                "RepoTags": [str(image.reference)],
                "Layers": [_blob(digest) for digest in digests],
            }
        ]
    )


def _blob(digest: str) -> str:
    return "blobs/sha256/" + digest.removeprefix("sha256:")


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    size: int
    open: Callable[[], IO[bytes]]


def _members(image: Image) -> list[_Member]:
    blobs = [
        _held(_blob(image.config_id), image.config),
        _held(_blob(image.manifest_id), image.manifest),
    ]
    files = dict(image.base_layers)
    if image.layer.path is not None:
        files[image.layer.diff_id] = image.layer.path
    blobs += [
        _Member(_blob(digest), path.stat().st_size, lambda path=path: path.open("rb"))  # type: ignore[misc]
        for digest, path in files.items()
    ]
    return [
        *sorted(blobs, key=lambda member: member.name),
        _held("index.json", index_document(image)),
        _held("manifest.json", _save_document(image)),
        _held("oci-layout", canonical({"imageLayoutVersion": "1.0.0"})),
    ]


def descriptors(saved: IO[bytes], diff_ids: Sequence[str]) -> tuple[Descriptor, ...]:
    """The blobs behind `diff_ids`, out of what an engine saves of an image; () when it hides them.

    Only the small documents are looked at, and reading stops at the manifest and config that belong
    together: the blobs themselves may be gigabytes.
    """
    manifests: list[dict[str, Any]] = []
    configs: set[str] = set()
    with tarfile.open(fileobj=saved, mode="r|") as tar:
        for member in tar:
            document = _document(tar, member)
            if "layers" in document and "config" in document:
                manifests.append(document)
            elif (document.get("rootfs") or {}).get("diff_ids") == list(diff_ids):
                configs.add(member.name)
            for manifest in manifests:
                if _blob(manifest["config"]["digest"]) in configs:
                    rows = manifest["layers"]
                    return tuple(
                        Descriptor(digest=r["digest"], size=r["size"], media_type=r["mediaType"])
                        for r in rows
                    )
    return ()


def _document(tar: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    """A JSON object that is what its name says, or an empty one."""
    content = tar.extractfile(member) if member.isreg() and member.size < _LARGEST else None
    if content is None:
        return {}
    data = content.read()
    if not data.startswith(b"{") or member.name != _blob(sha256(data)):
        return {}
    found = json.loads(data)
    return found if isinstance(found, dict) else {}


def _held(name: str, data: bytes) -> _Member:
    return _Member(name, len(data), lambda: io.BytesIO(data))


def archive_size(image: Image) -> int:
    """The number of bytes that `stream` will give."""
    total = sum(512 + member.size + -member.size % 512 for member in _members(image)) + 1024
    return total + -total % _RECORD


def stream(image: Image) -> Iterator[bytes]:
    """Give the archive in slices; nothing is held but the slice and the small documents."""
    sent = 0
    for member in _members(image):
        info = tarfile.TarInfo(member.name)
        info.size, info.mode, info.mtime = member.size, 0o644, 0
        yield info.tobuf(tarfile.USTAR_FORMAT)
        with member.open() as source:
            while block := source.read(_SLICE):
                yield block
        yield bytes(-member.size % 512)
        sent += 512 + member.size + -member.size % 512
    yield bytes(1024 + -(sent + 1024) % _RECORD)


__all__ = [
    "LAYER_TYPE",
    "Image",
    "Reference",
    "archive_size",
    "descriptors",
    "index_document",
    "stream",
]
