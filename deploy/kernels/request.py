"""What a build is asked for and what it gives, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.agent.plan import PlannedFile, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One extension: the module to import, its CMake target and component, and its ops.

    `ops` maps an op's name to its whole schema, or to "" where only the name matters.
    """

    module: str
    namespace: str
    target: str
    component: str
    ops: Mapping[str, str] = field(default_factory=dict)
    mode: str = "0755"

    @property
    def stem(self) -> str:
        """The installed path without its suffix: vllm/_rocm_C."""
        return self.module.replace(".", "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """All that decides the bytes of a build, and where they go.

    `python` is the service's interpreter (its torch converts and links), `changed` the compiled
    sources that differ from the base, `sources` a digest over all that are compiled, `out` the
    folder for artefacts, logs and the source patch.
    """

    name: str
    repo: Path
    head: str
    arch: str
    preset: str
    extensions: tuple[Wanted, ...]
    python: str
    build_dir: Path
    out: Path
    presets: Path
    base: str = ""
    package: str = "vllm"
    env_script: str = ""
    changed: tuple[str, ...] = ()
    sources: str = ""
    ccache_dir: Path | None = None
    ccache_size: int = 5 * 2**30
    jobs: int = 0
    own_repo: bool = False

    @property
    def source(self) -> Path:
        return self.build_dir / "src"

    @property
    def binary(self) -> Path:
        return self.build_dir / "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """One staged extension as it was taken: `file` holds the bytes, `path` is below the site."""

    module: str
    path: str
    mode: str
    size: int
    sha256: str
    file: Path

    def to_json(self) -> dict[str, Any]:
        """Return what a lock pins; where this machine keeps the file is no part of it."""
        keys = ("module", "path", "mode", "size", "sha256")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What came out: the artefacts, and the document `kernels/1` with its proofs."""

    artefacts: tuple[Artefact, ...]
    evidence: Mapping[str, Any]


def planned(artefact: Artefact, *base: State) -> PlannedFile:
    """Return the artefact as a file of the plan; `base` is what the base may hold at that path.

    A reinstalled wheel may have taken the file away again, so its absence is always expected too.
    """
    want = State(type="file", mode=artefact.mode, sha256=artefact.sha256, size=artefact.size)
    absent = State(type="absent")
    return PlannedFile(
        path=artefact.path,
        role="extension",
        want=want,
        assume=(*(state for state in base if state != absent), absent),
    )
