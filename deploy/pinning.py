"""What a lock pins about images, and one submission's way from its pinned base to an order.

A manifest whose source is a wheel and that names no base image is built on the wheel's own tree,
the same on every machine; every other base comes from the engine that holds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import scripts
from deploy.bundle import Bundle
from deploy.carriers.assembly import (
    Folders,
    Ground,
    Order,
    assembled,
    described,
    handed_in,
    predicted,
)
from deploy.carriers.engine import Engine, open_engine
from deploy.console import say
from deploy.errors import BadValues, Refused, StaleLock, Unfit, Unreachable
from deploy.image.archive import Image, Reference, archive_size, stream
from deploy.image.base import Memory, Pin, check_pin, new_index, repo_digests
from deploy.image.config import Base
from deploy.image.layer import Layer
from deploy.image.plain import Plain, plain
from deploy.lock import Lock
from deploy.scripts import Rendered
from deploy.submission import Submission

PREFIX = "dcu-bundle/"
_TELL = 1.0  # seconds between two lines of progress


def expect(
    found: Submission, made: Bundle, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a lock pins about images; empty where nobody here can know the base.

    On a wheel's tree everything follows from bytes at hand. Any other base is pinned from the
    engine that holds it; where none does, the pin of the lock `before` stays while the manifest
    asks for the same image.
    """
    job = Job(found, made, Lock(inputs=found.inputs, expect={}))
    if is_plain(found):
        with _plain(job) as ground:
            order = job.order("", ground.base, "")
            with assembled(ground, order, job.folders) as image:
                return {"image": described(image).expect}
    if not found.manifest.base.image:
        return {}
    asked = found.manifest.base.image
    why = f"no engine here holds {asked}"
    try:
        with open_engine() as engine:
            if (answer := engine.inspect(asked)) is not None:
                pin = {"base_image": _pin(found, answer).to_json()}
                return {**pin, **_image(engine, found, made, pin)}
    except Unreachable as err:
        why = err.what
    kept = _pin_before(found, made, before or {})
    said = "its pin is the one of the lock before" if kept else "the base image is not pinned"
    say(f"{found.name}: {why}; {said}")
    return kept


def _image(
    engine: Engine, found: Submission, made: Bundle, pin: Mapping[str, Any]
) -> dict[str, Any]:
    """The image on that base; nothing where the base, as it is, is none for the plan."""
    job = Job(found, made, Lock(inputs=found.inputs, expect=pin))
    try:
        with job.base(engine, pull=False) as (reference, base):
            order = job.order(reference, base, "")
            return {"image": predicted(engine, order, job.folders).expect}
    except (Unfit, StaleLock, Refused) as err:
        say(f"{found.name}: the image is not pinned: {err.what} ({err.why})")
        return {}


def _pin_before(found: Submission, made: Bundle, before: Mapping[str, Any]) -> dict[str, Any]:
    raw = before.get("base_image")
    if raw is None or Pin.parse(raw).reference != found.manifest.base.image:
        return {}
    same = before.get("bundle") == made.sha256 and "image" in before
    return {"base_image": raw, **({"image": before["image"]} if same else {})}


@dataclass(frozen=True, slots=True)
class Job:
    """One submission, its bundle and its lock."""

    found: Submission
    made: Bundle
    pinned: Lock

    @property
    def folders(self) -> Folders:
        return Folders(work=self.found.out / "image", cache=self.found.layout.cache / "image")

    @contextlib.contextmanager
    def base(self, engine: Engine, *, pull: bool) -> Iterator[tuple[str, Base]]:
        """The base's name in the engine, which holds it from now on."""
        if is_plain(self.found):
            with plain_base(self) as (wheel, _):
                yield _loaded(engine, self, wheel), wheel.base
            return
        reference = _base_reference(self.found, self.pinned)
        if engine.inspect(reference) is None:
            reference = self._stand_in(engine, reference, pull=pull)
        yield reference, Base(diff_ids=())

    def _stand_in(self, engine: Engine, reference: str, *, pull: bool) -> str:
        """Another name for the locked base: pulled by digest, or the tag where it is the same."""
        tag = self.found.manifest.base.image
        there = engine.inspect(tag)
        pin = Pin.parse(self.pinned.expect["base_image"])
        if there is not None and Base.from_inspect(there).diff_ids == pin.diff_ids:
            if new_index(pin, repo_digests(there)):
                say(f"{tag}: the same platform image as locked, below a new index")
            return tag
        if there is not None and not pull:
            check_pin(pin, Base.from_inspect(there), repo_digests(there))
        if pull:
            engine.pull(reference, Meter("pull"))
        return reference

    def order(self, reference: str, base: Base, tag: str) -> Order:
        raw = self.pinned.expect.get("base_image")
        return Order(
            bundle=self.made,
            base=reference,
            reference=Reference.parse(tag or PREFIX + self.found.name),
            epoch=self.found.delta.head_time,
            pin=None if is_plain(self.found) or raw is None else Pin.parse(raw),
            base_layers=base.layers,
            extras=handed_in(self.made, self.found.scripts),
            expect=dict(self.pinned.expect.get("image") or {}),
        )


def rendered(found: Submission, pinned: Lock) -> tuple[Rendered, ...]:
    raw = pinned.expect.get("base_image")
    base = _base_reference(found, pinned) if raw else ""
    return scripts.files(found.manifest, base=base)


def is_plain(found: Submission) -> bool:
    return not found.manifest.base.image and found.wheel is not None


def _base_reference(found: Submission, pinned: Lock) -> str:
    """The base as the engine is to be asked for it: by digest where the lock has one."""
    reference = found.manifest.base.image
    if not reference:
        raise BadValues(
            f"{found.name} has no base image",
            why="its manifest has no base.image, and its source is no wheel to stand in for one",
            fix=f"add base.image to manifests/{found.name}.yaml and run `./inv lock`",
        )
    raw = pinned.expect.get("base_image")
    if raw is None:
        raise BadValues(
            f"the base image of {found.name} is not pinned: a tag without digest",
            why="the lock was made where no engine held it, so another image may answer to the tag",
            fix=f"`docker pull {reference}`, then `./inv lock -n {found.name}`",
        )
    digest = str(raw.get("digest") or "")
    return f"{Reference.parse(reference).name}@{digest}" if digest else reference


def _pin(found: Submission, answer: Mapping[str, Any]) -> Pin:
    reference = found.manifest.base.image
    # A digest in the manifest is what was asked for, and so a part of the lock's inputs.
    digest = reference.partition("@")[2] or next(iter(repo_digests(answer)), "")
    pin = Pin.of(reference, Base.from_inspect(answer), digest)
    return dataclasses.replace(pin, platform=found.manifest.base.platform)


@contextlib.contextmanager
def plain_base(job: Job) -> Iterator[tuple[Plain, Ground]]:
    assert job.found.wheel is not None
    base = job.found.manifest.base
    with plain(job.found.wheel, base.site, job.folders.cache, base.platform) as wheel:
        yield wheel, Ground(base=wheel.base, files=Memory(wheel.files))


@contextlib.contextmanager
def _plain(job: Job) -> Iterator[Ground]:
    with plain_base(job) as (_, ground):
        yield ground


def _loaded(engine: Engine, job: Job, wheel: Plain) -> str:
    """The wheel's tree as an image of the engine, loaded when it is not there yet."""
    short = wheel.base.diff_ids[0].removeprefix("sha256:")[:12]
    reference = Reference(f"{PREFIX}{job.found.name}-base", short)
    there = engine.inspect(str(reference))
    if there is not None and tuple(there["RootFS"]["Layers"]) == wheel.base.diff_ids:
        return str(reference)
    say(f"{job.found.name}: loading the base, the wheel's tree on nothing")
    with layer_file(job, wheel) as layer:
        nothing = dataclasses.replace(wheel.base, diff_ids=(), layers=())
        image = Image(reference=reference, base=nothing, layer=layer, config=wheel.config)
        engine.load(stream(image), archive_size(image), Meter("load"))
    return str(reference)


@contextlib.contextmanager
def layer_file(job: Job, wheel: Plain) -> Iterator[Layer]:
    job.folders.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.folders.work, prefix=".base-") as folder:
        yield wheel.write(Path(folder, "layer.tar"))


class Meter:
    """Says how many bytes have gone, at most once a second."""

    def __init__(self, verb: str) -> None:
        self._verb, self._next = verb, time.monotonic() + _TELL

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _TELL
        of = f" of {total / 1e6:.1f}" if total else ""
        say(f"{self._verb}: {done / 1e6:.1f}{of} MB")
