"""What an image says of itself, in one canonical form: its config, its run config, its content id.

Pure: the base's facts come in as a value (`Base`), documents go out as bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from deploy.agent.words import canonical

# What a builder hands on from the base; the rest of an inspect answer is one container's history.
KEPT = (
    "Cmd",
    "Entrypoint",
    "Env",
    "ExposedPorts",
    "Labels",
    "StopSignal",
    "User",
    "Volumes",
    "WorkingDir",
)
# The part of a config that changes what runs; a tag that moved shows here or in the layers.
RUN = ("Cmd", "Entrypoint", "Env", "User", "WorkingDir")
# Builders add it where the base has no Env; loading does not, so it is always set.
DEFAULT_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """One layer blob as a content store names it: compressed or not."""

    digest: str
    size: int
    media_type: str = LAYER_TYPE

    def to_json(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The base image: `diff_ids` in order, `config` as inspect shows it.

    `layers` are the blobs behind the diff_ids, in the same order; empty where nobody said their
    sizes, and then no manifest digest can be predicted.
    """

    diff_ids: tuple[str, ...]
    architecture: str = "amd64"
    os: str = "linux"
    variant: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[Descriptor, ...] = ()
    id: str = ""

    @property
    def platform(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)

    @property
    def run_config(self) -> str:
        """The sha256 of the canonical run config."""
        return sha256(canonical(run_config(self.config)))

    @classmethod
    def from_inspect(cls, answer: Mapping[str, Any]) -> Base:
        """Read what an engine's image inspect says."""
        return cls(
            id=answer["Id"],
            diff_ids=tuple(answer["RootFS"].get("Layers") or ()),
            architecture=answer["Architecture"],
            os=answer["Os"],
            variant=answer.get("Variant") or "",
            config=answer.get("Config") or {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What our image adds to the base's config; an empty `entrypoint` keeps the base's."""

    note: str
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


def config_document(base: Base, layer: str, added: Added, *, epoch: int) -> bytes:
    """Return the image config: `layer` is our diff_id, `epoch` the only clock (seconds, UTC)."""
    created = datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    # One entry a layer, or `docker history` pairs the wrong ones.
    history = [
        {"created": created, "created_by": f"base layer {diff_id}"} for diff_id in base.diff_ids
    ]
    history.append({"created": created, "created_by": added.note})
    value = {
        "architecture": base.architecture,
        "os": base.os,
        "created": created,
        "config": _merged(base.config, added),
        "rootfs": {"type": "layers", "diff_ids": [*base.diff_ids, layer]},
        "history": history,
    }
    if base.variant:
        value["variant"] = base.variant
    return canonical(value)


def _merged(config: Mapping[str, Any], added: Added) -> dict[str, Any]:
    kept = {key: config[key] for key in KEPT if config.get(key)}
    kept["Env"] = _environment(kept.get("Env") or [DEFAULT_PATH], added.env)
    labels = {**kept.get("Labels", {}), **added.labels}
    if labels:
        kept["Labels"] = labels
    if added.entrypoint:
        kept.pop("Cmd", None)  # it was written for the other entrypoint
        kept["Entrypoint"] = list(added.entrypoint)
    if added.cmd:
        kept["Cmd"] = list(added.cmd)
    return kept


def _environment(base: Sequence[str], added: Mapping[str, str]) -> list[str]:
    """The base's variables in their order, replaced in place, then the new ones by name."""
    names = [line.partition("=")[0] for line in base]
    merged = [
        f"{name}={added[name]}" if name in added else line
        for name, line in zip(names, base, strict=True)
    ]
    return merged + [f"{name}={added[name]}" for name in sorted(added) if name not in names]


def run_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The run config in canonical form: what is not said is null, however an engine says it."""
    return {key: config.get(key) or None for key in RUN}


def content_id(diff_ids: Sequence[str], config: Mapping[str, Any], architecture: str) -> str:
    """Return one id for what an image does, the same for every way to make it.

    Dates, history and the marks that a builder leaves of itself are not in it.
    """
    said = {key: config.get(key) or None for key in KEPT}
    labels = {
        key: value
        for key, value in (config.get("Labels") or {}).items()
        if not key.startswith("io.buildah.")
    }
    said["Labels"] = labels or None
    return sha256(canonical({"layers": list(diff_ids), "config": said, "arch": architecture}))


def manifest_document(config: bytes, layers: Sequence[Descriptor]) -> bytes:
    """Return the OCI manifest; its digest is the image's id where images live in containerd."""
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {
                "mediaType": CONFIG_TYPE,
                "digest": "sha256:" + sha256(config),
                "size": len(config),
            },
            "layers": [layer.to_json() for layer in layers],
        }
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
