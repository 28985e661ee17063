"""What the base image holds at the paths that matter, and whether the plan may replace it.

Looking costs a call of the engine each; an image never changes under its id, so what was seen is
kept by id (`Memory`) and asked for once.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deploy.agent.plan import Plan, PlannedFile, State
from deploy.errors import BadValues, Refused, StaleLock, Unfit

from .beside import beside
from .config import Base

_MOST_LINKS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One path in an image: `kind` is file, folder, link, other or absent."""

    kind: str = "absent"
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    sha256: str = ""
    link: str = ""

    @property
    def state(self) -> State:
        """The same in the plan's words; a folder or device is a state that no plan can want."""
        if self.kind == "file":
            mode = f"{self.mode & 0o7777:04o}"
            return State(type="file", mode=mode, sha256=self.sha256, size=self.size)
        return State(type=self.kind, link=self.link)


class Files(Protocol):
    """Looks into an image, at absolute paths. The last part is not followed when it is a link."""

    def look(self, path: str) -> Seen: ...

    def names(self, folder: str) -> tuple[str, ...]:
        """The names directly in a folder, sorted; none where there is no folder."""
        ...

    def other(self, folder: str, known: Collection[str]) -> str:
        """One name directly in a folder that is not among `known`; "" where there is none.

        A folder may hold gigabytes: the answer to this costs only what must be looked at.
        """
        ...


class Memory:
    """Files of one image that remember, also on disk: `file` belongs to that image's id alone."""

    def __init__(self, files: Files, file: Path | None = None) -> None:
        self._files = files
        self._file = file
        self._seen: dict[str, Seen] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._new = False
        self._read()

    def look(self, path: str) -> Seen:
        if path not in self._seen:
            self._seen[path] = self._files.look(path)
            self._new = True
        return self._seen[path]

    def names(self, folder: str) -> tuple[str, ...]:
        if folder not in self._names:
            self._names[folder] = self._files.names(folder)
            self._new = True
        return self._names[folder]

    def other(self, folder: str, known: Collection[str]) -> str:
        key = f"{folder}/ beside {json.dumps(sorted(known))}"
        return self.learn(key, lambda: (self._files.other(folder, known),))[0]

    def learn(self, key: str, ask: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """Names that were found out in another way, kept under a key of their own."""
        if key not in self._names:
            self._names[key] = ask()
            self._new = True
        return self._names[key]

    def keep(self) -> None:
        """Write what is new; a failed write costs only time."""
        if self._file is None or not self._new:
            return
        raw = {
            "seen": {path: dataclasses.asdict(seen) for path, seen in self._seen.items()},
            "names": self._names,
        }
        with beside(self._file) as new:
            new.write_text(json.dumps(raw, sort_keys=True), encoding="utf-8")

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            raw = json.loads(self._file.read_text(encoding="utf-8"))
            self._seen = {path: Seen(**seen) for path, seen in raw["seen"].items()}
            self._names = {path: tuple(names) for path, names in raw["names"].items()}
        except (OSError, ValueError, TypeError, KeyError):
            self._seen, self._names = {}, {}  # absent or not ours: ask again


def resolve(files: Files, path: str) -> str:
    """Return `path` with every link on the way replaced, the last part included.

    A layer that named a linked folder would put a folder in the link's place, and hide what the
    link leads to. What is absent is taken as it is.

    Raises:
        Unfit: the links go in a circle.
    """
    parts = [part for part in path.split("/") if part]
    done: list[str] = []
    links = 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            done = done[:-1]
            continue
        here = "/" + "/".join([*done, part])
        seen = files.look(here)
        if seen.kind != "link":
            done.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise Unfit(
                f"cannot find {path} in the base image",
                why=f"the links from {here} go in a circle",
                fix="name the real folder in the manifest",
            )
        if seen.link.startswith("/"):
            done = []
        parts = [p for p in seen.link.split("/") if p not in ("", ".")] + parts
    return "/" + "/".join(done)


def site_of(files: Files, plan: Plan) -> str:
    """Return the site's real folder in the image. Raises Unfit where there is none."""
    site = resolve(files, plan.site)
    if files.look(site).kind != "folder":
        raise Unfit(
            f"the base image has no folder {plan.site}",
            why=f"at {site} there is {files.look(site).kind}",
            fix="set base.site to the folder that holds the package in this image",
        )
    return site


def require(files: Files, site: str, plan: Plan, installed: Collection[str] = ()) -> None:
    """Raise Unfit unless the site holds the promised distributions.

    `installed` are the names of the site's dist-info folders, where the image has a Python that
    could list them. Without one only exact versions can be asked for, one by one.
    """
    missing = [
        f"{name} {version}"
        for name, version in plan.requires.items()
        if not any(_provides(entry, name, version) for entry in installed)
        and not _has(files, site, name, version)
    ]
    if missing:
        have = sorted(e for e in installed if any(_provides(e, n, "") for n in plan.requires))
        raise Unfit(
            "the base image does not hold what the manifest requires",
            why=f"{site} has no {', '.join(missing)}"
            + (f"; it has {', '.join(have)}" * bool(have)),
            fix="take the base the manifest means, or set base.requires to what is in this one",
        )


def _has(files: Files, site: str, name: str, version: str) -> bool:
    spellings = {name, name.replace("-", "_"), name.lower().replace("-", "_")}
    return any(
        files.look(f"{site}/{spelling}-{version}.dist-info").kind == "folder"
        for spelling in sorted(spellings)
    )


def _provides(entry: str, name: str, version: str) -> bool:
    """True when a dist-info folder is of `name`, in `version` or a local version of it."""
    found, _, rest = entry.removesuffix(".dist-info").partition("-")
    same = _normal(found) == _normal(name)
    return same and (not version or rest == version or rest.startswith(version + "+"))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Cleared:
    """The files of a base as a plan finds them: below a path that goes there is nothing.

    Where a link or a file of the base becomes a folder, an engine would follow the one and stumble
    over the other.
    """

    def __init__(self, files: Files, site: str, plan: Plan) -> None:
        self._files = files
        self.going = {f"{site}/{entry.path}" for entry in plan.files if entry.want.absent}

    def look(self, path: str) -> Seen:
        return Seen() if self._cleared(path) else self._files.look(path)

    def names(self, folder: str) -> tuple[str, ...]:
        return () if self._goes(folder) else self._files.names(folder)

    def other(self, folder: str, known: Collection[str]) -> str:
        return "" if self._goes(folder) else self._files.other(folder, known)

    def loses_all(self, folder: str) -> bool:
        """True when the plan takes whatever a folder holds, so that a file may stand there."""
        paths = [f"{folder}/{name}" for name in self.names(folder)]
        return all(
            self._leaves(path) or (self.look(path).kind == "folder" and self.loses_all(path))
            for path in paths
        )

    def _leaves(self, path: str) -> bool:
        if path in self.going:
            return True
        folder, name = posixpath.split(path)
        above, cache = posixpath.split(folder)
        stem = name.partition(".")[0]
        return cache == "__pycache__" and f"{above}/{stem}.py" in self.going

    def _goes(self, path: str) -> bool:
        return path in self.going or self._cleared(path)

    def _cleared(self, path: str) -> bool:
        while (path := posixpath.dirname(path)) != "/":
            if path in self.going:
                return True
        return False


def judge(files: Cleared, site: str, plan: Plan) -> None:
    """Raise Refused, naming every file, unless each is what the plan assumes or promises."""
    looked = [(entry, f"{site}/{entry.path}") for entry in plan.files]
    seen = [(entry, path, files.look(path)) for entry, path in looked]
    strange = [(e, found) for e, path, found in seen if not _fits(e, _state(files, path, found))]
    if strange:
        raise Refused(
            f"{len(strange)} of the base image's files are not what the plan was made for",
            why="; ".join(_shown(entry, seen) for entry, seen in strange),
            fix="take the base the lock pins, or accept these bytes with overlay.accept",
        )


def _state(files: Cleared, path: str, seen: Seen) -> State:
    """What the plan may count on: a folder that loses all it holds is nothing."""
    return State() if seen.kind == "folder" and files.loses_all(path) else seen.state


def _fits(entry: PlannedFile, found: State) -> bool:
    return any(found.same_content(state) for state in (*entry.assume, entry.want))


def _shown(entry: PlannedFile, seen: Seen) -> str:
    assumed = " or ".join(_short(state) for state in entry.assume)
    return (
        f"{entry.path}: assumed {assumed}, promised {_short(entry.want)}, "
        f"found {_short(seen.state)}"
    )


def _short(state: State) -> str:
    return state.sha256[:12] or (f"a link to {state.link}" if state.link else state.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The base image as the lock pins it. `digest` is the registry's, where there was one."""

    reference: str
    diff_ids: tuple[str, ...]
    run_config: str
    platform: str
    digest: str = ""
    sizes: tuple[int, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "digest": self.digest,
            "diff_ids": list(self.diff_ids),
            "run_config": self.run_config,
            "platform": self.platform,
        }

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Pin:
        """Read a pin from the lock.

        Raises:
            BadValues: it does not pin enough to tell one image from another.
        """
        if not raw.get("diff_ids"):
            raise BadValues(
                "the base image is not reproducible",
                why=f"{raw.get('reference')} is a tag without digest: it pins no layer",
                fix="run `./inv lock` where an engine holds the image, to have its layers pinned",
            )
        return cls(
            reference=str(raw["reference"]),
            digest=str(raw.get("digest", "")),
            diff_ids=tuple(raw["diff_ids"]),
            run_config=str(raw["run_config"]),
            platform=str(raw["platform"]),
        )

    @classmethod
    def of(cls, reference: str, base: Base, digest: str = "") -> Pin:
        return cls(
            reference=reference,
            digest=digest,
            diff_ids=base.diff_ids,
            run_config=base.run_config,
            platform=base.platform,
        )


def check_pin(pin: Pin, base: Base, digests: Collection[str] = ()) -> None:
    """Raise StaleLock or Unfit, naming every difference, unless `base` is the pinned one.

    `digests` are those that registries know `base` by.
    """
    if base.platform != pin.platform:
        raise Unfit(
            f"the base image is for {base.platform}",
            why=f"the manifest asks for {pin.platform}",
            fix=f"pull it again with `docker pull --platform {pin.platform} {pin.reference}`",
        )
    faults = list(_layer_faults(pin.diff_ids, base.diff_ids))
    if base.run_config != pin.run_config:
        faults.append(
            f"its run config (Env, Entrypoint, Cmd, User, WorkingDir) has the digest "
            f"{base.run_config[:12]}, the lock pins {pin.run_config[:12]}"
        )
    if faults and new_index(pin, digests):
        faults.append(f"registries know it as {', '.join(digests)}, the lock pins {pin.digest}")
    if faults:
        raise StaleLock(
            f"{pin.reference} is not the base image that was locked",
            why="; ".join(faults),
            fix="the tag moved: pull the image by the locked digest, or run `./inv lock` to take "
            "this one",
        )


def repo_digests(answer: Mapping[str, Any]) -> list[str]:
    """The digests by which registries know an image, as an engine's inspect tells them; sorted."""
    return sorted(str(text).partition("@")[2] for text in answer.get("RepoDigests") or ())


def new_index(pin: Pin, digests: Collection[str]) -> bool:
    """True when a registry names the very same image by another digest than the locked one.

    A tag that got a new index (another platform was added) still leads to the same layers.
    """
    return bool(pin.digest) and bool(digests) and pin.digest not in digests


def _layer_faults(pinned: Sequence[str], found: Sequence[str]) -> Iterator[str]:
    if len(pinned) != len(found):
        yield f"it has {len(found)} layers, the lock pins {len(pinned)}"
    for number, (want, have) in enumerate(zip(pinned, found, strict=False), 1):
        if want != have:
            yield f"layer {number} is {have[:19]}, the lock pins {want[:19]}"
            return
