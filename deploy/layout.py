"""Where things lie in a checkout: the only module that knows the folder names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders of one checkout. `top` is the folder that holds tasks.py."""

    top: Path

    def manifest(self, name: str) -> Path:
        return self.top / "manifests" / f"{name}.yaml"

    def lock(self, name: str) -> Path:
        return self.top / "manifests" / f"{name}.lock.yaml"

    def files(self, name: str) -> Path:
        """What a vendor's image holds, where somebody listed it."""
        return self.top / "manifests" / f"{name}.files"

    def series(self, name: str) -> Path:
        return self.top / "overlay" / name

    @property
    def out(self) -> Path:
        """Everything made by a run; safe to delete."""
        return self.top / "out"

    def out_of(self, name: str) -> Path:
        return self.out / name

    @property
    def cache(self) -> Path:
        """Downloads and derived repositories, addressed by digest; safe to delete."""
        return self.out / "cache"


HERE = Layout(Path(__file__).resolve().parent.parent)
