"""What an operator can ask for about images: build one from the lock, render, clean up.

The same sentence as in `deploy.flow`, with an image at its end. A manifest whose source is a wheel
and that names no base image is built on the wheel's own tree, the same on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import flow, scripts
from deploy.agent.plan import tree_digest
from deploy.bundle import Bundle, file_sha256
from deploy.carriers.assembly import (
    BUNDLE,
    Built,
    Folders,
    Ground,
    Order,
    assembled,
    base_of,
    build,
    described,
    handed_in,
    require_expected,
    write_archive,
)
from deploy.carriers.engine import NAME, Engine, open_engine
from deploy.console import say
from deploy.errors import BadValues, BundleError, StaleLock
from deploy.image.archive import Image, Reference, archive_size, stream
from deploy.image.base import Memory, Pin, check_pin, new_index, repo_digests, resolve
from deploy.image.config import Base, Descriptor, content_id
from deploy.image.layer import Layer
from deploy.image.plain import LABEL, Plain, plain
from deploy.layout import HERE, Layout
from deploy.lock import Lock, read_lock
from deploy.scripts import Rendered
from deploy.submission import Submission

_PREFIX = "dcu-bundle/"
_TELL = 1.0  # seconds between two lines of progress


def build_image(
    name: str,
    layout: Layout = HERE,
    *,
    tag: str = "",
    output: str = "",
    pull: bool = False,
    fresh: bool = False,
) -> Built:
    """Build the locked image and load it into the engine, or write it to ``oci:FILE`` alone.

    Raises:
        Differs: an id is not the locked one; nothing was loaded or written.
    """
    found, made = flow.bundle(name, layout)
    job = _Job(found, made, read_lock(layout.lock(found.name)))
    if output:
        return _to_file(job, tag, _archive_path(output), fresh=fresh)
    with open_engine() as engine, job.base(engine, pull=pull) as (reference, base):
        order = job.order(reference, base, tag)
        meters = {"progress": _Meter("load"), "looking": _Meter("look")}
        return build(engine, order, job.folders, **meters, fresh=fresh)


def build_dockerfile(name: str, layout: Layout = HERE, *, tag: str = "") -> Built:
    """Build the rendered Dockerfile with the engine's classic builder, on the locked base.

    Its layers are encoded by the builder, so their ids say nothing; what it shares with the loaded
    image is the tree that verify reads inside, and the run config.
    """
    from deploy.carriers import recipe

    found, _ = flow.bundle(name, layout)
    render(name, layout)
    reference = Reference.parse(tag or f"{_PREFIX}{found.name}:dockerfile")
    with open_engine() as engine:
        recipe.build(engine, found.out / "rendered", str(reference), say)
        answer = engine.inspect(str(reference)) or {}
    base = Base.from_inspect(answer)
    return Built(
        reference=str(reference),
        id=base.id,
        layer=base.diff_ids[-1],
        config="",
        content=content_id(base.diff_ids, base.config, base.architecture),
        base=base.diff_ids[:-1],
        run_config=base.run_config,
    )


def reproduce(
    name: str, layout: Layout = HERE, *, tag: str = ""
) -> tuple[Built, list[dict[str, str]]]:
    """Rebuild the image from nothing but the lock, and compare rung by rung up to the tree inside.

    Raises:
        Differs: the first rung that diverged, with both values.
    """
    found, made, pinned, links = flow.rederive(name, layout)
    job = _Job(found, made, pinned)
    want = dict(pinned.expect.get("image") or {})
    with open_engine() as engine, job.base(engine, pull=False) as (reference, base):
        order = dataclasses.replace(job.order(reference, base, tag), expect={})
        meters = {"progress": _Meter("load"), "looking": _Meter("look")}
        built = build(engine, order, job.folders, **meters, fresh=True)
        tree = _tree_inside(engine, built.reference, made)
    if found.wheel is not None and _is_plain(found):
        links += flow.compare([("base image", ",".join(base.diff_ids), ",".join(built.base))])
    rungs = ("layer", "config", "manifest", "content", "run_config")
    known = [rung for rung in rungs if want.get(rung)]
    links += flow.compare([(f"image {r}", want[r], built.expect[r]) for r in known])
    shown = built.config if built.id == built.config else built.manifest
    links += flow.compare([("image id", shown, built.id)])
    links += flow.compare([("tree inside", str(pinned.expect.get("tree", "")), tree)])
    return built, links


def _tree_inside(engine: Engine, reference: str, made: Bundle) -> str:
    """The tree digest as the files of a container show it; no program of the image takes part."""
    plan = made.plan
    with engine.still(reference) as still:
        site = resolve(still, plan.site)
        return tree_digest((e.path, still.look(f"{site}/{e.path}").state) for e in plan.files)


def expect(found: Submission, made: Bundle) -> dict[str, Any]:
    """What a lock pins about images; empty where nobody here can know the base.

    On a wheel's tree everything follows from bytes at hand. Any other base is pinned from the
    engine that holds it.
    """
    job = _Job(found, made, Lock(inputs=found.inputs, expect={}))
    if _is_plain(found):
        with _plain(job) as ground:
            order = job.order("", ground.base, "")
            with assembled(ground, order, job.folders) as image:
                return {"image": described(image).expect}
    if not found.manifest.base.image:
        return {}
    try:
        with open_engine() as engine:
            answer = engine.inspect(found.manifest.base.image)
            if answer is None:
                say(f"{found.name}: no engine here holds {found.manifest.base.image}; not pinned")
                return {}
            pin = _pin(found, answer)
    except BundleError as err:
        say(f"{found.name}: the base image is not pinned: {err.what}")
        return {}
    return {"base_image": pin.to_json()}


def render(name: str, layout: Layout = HERE, *, output: str = "") -> list[Path]:
    """Write the rendered files into a folder, beside the bundle that they run; return their paths.

    The folder is a build context: ``docker build FOLDER``.
    """
    found, made = flow.bundle(name, layout)
    folder = Path(output) if output else found.out / "rendered"
    folder.mkdir(parents=True, exist_ok=True)
    pinned = read_lock(layout.lock(found.name))
    paths = []
    for one in _rendered(found, pinned):
        _put(folder / one.name, one.data, one.mode)
        paths.append(folder / one.name)
    _copy(made.path, folder / BUNDLE)
    return [*paths, folder / BUNDLE]


def gc(layout: Layout = HERE) -> list[dict[str, str]]:
    """Remove what calls of this product left: containers of dead calls, images of older builds, and
    bases that were made here.

    An image that was built last for its manifest stays, and so does one that a container uses.
    """
    del layout
    rows = []
    with open_engine() as engine:
        for one in engine.left_over():
            engine.remove_container(one["Id"])
            rows.append({"kind": "container", "id": one["Id"], "kept": ""})
        for image in [*_superseded(engine.images(NAME)), *_bases(engine.images(LABEL))]:
            why = engine.remove_image(image["Id"])
            rows.append({"kind": "image", "id": image["Id"], "kept": why})
    return rows


def _superseded(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Images of ours that no tag names any more: a later build took the name."""
    return [one for one in images if not _tags(one)]


def _bases(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bases of ours, which are made again when they are needed; images on them are none."""
    return [one for one in images if NAME not in (one.get("Labels") or {})]


def _tags(image: Mapping[str, Any]) -> list[str]:
    return [tag for tag in image.get("RepoTags") or () if tag != "<none>:<none>"]


@dataclass(frozen=True, slots=True)
class _Job:
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
        if _is_plain(self.found):
            with _plain_base(self) as (wheel, _):
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
            engine.pull(reference, _Meter("pull"))
        return reference

    def order(self, reference: str, base: Base, tag: str) -> Order:
        raw = self.pinned.expect.get("base_image")
        return Order(
            bundle=self.made,
            base=reference,
            reference=Reference.parse(tag or _PREFIX + self.found.name),
            epoch=self.found.delta.head_time,
            pin=None if _is_plain(self.found) or raw is None else Pin.parse(raw),
            base_layers=base.layers,
            extras=handed_in(self.made, self.found.scripts),
            expect=dict(self.pinned.expect.get("image") or {}),
        )


def _rendered(found: Submission, pinned: Lock) -> tuple[Rendered, ...]:
    raw = pinned.expect.get("base_image")
    base = _base_reference(found, pinned) if raw else ""
    return scripts.files(found.manifest, base=base)


def _is_plain(found: Submission) -> bool:
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
    digests = repo_digests(answer)
    pin = Pin.of(reference, Base.from_inspect(answer), digests[0] if digests else "")
    return dataclasses.replace(pin, platform=found.manifest.base.platform)


# --- a base that is a wheel's tree ----------------------------------------------------------------


@contextlib.contextmanager
def _plain_base(job: _Job) -> Iterator[tuple[Plain, Ground]]:
    assert job.found.wheel is not None
    base = job.found.manifest.base
    with plain(job.found.wheel, base.site, job.folders.cache, base.platform) as wheel:
        yield wheel, Ground(base=wheel.base, files=Memory(wheel.files))


@contextlib.contextmanager
def _plain(job: _Job) -> Iterator[Ground]:
    with _plain_base(job) as (_, ground):
        yield ground


def _loaded(engine: Engine, job: _Job, wheel: Plain) -> str:
    """The wheel's tree as an image of the engine, loaded when it is not there yet."""
    short = wheel.base.diff_ids[0].removeprefix("sha256:")[:12]
    reference = Reference(f"{_PREFIX}{job.found.name}-base", short)
    there = engine.inspect(str(reference))
    if there is not None and tuple(there["RootFS"]["Layers"]) == wheel.base.diff_ids:
        return str(reference)
    say(f"{job.found.name}: loading the base, the wheel's tree on nothing")
    with _layer_file(job, wheel) as layer:
        nothing = dataclasses.replace(wheel.base, diff_ids=(), layers=())
        image = Image(reference=reference, base=nothing, layer=layer, config=wheel.config)
        engine.load(stream(image), archive_size(image), _Meter("load"))
    return str(reference)


@contextlib.contextmanager
def _layer_file(job: _Job, wheel: Plain) -> Iterator[Layer]:
    job.folders.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.folders.work, prefix=".base-") as folder:
        yield wheel.write(Path(folder, "layer.tar"))


# --- a file instead of an engine ------------------------------------------------------------------


def _archive_path(output: str) -> Path:
    kind, _, path = output.partition(":")
    if kind != "oci" or not path:
        raise BadValues(
            f"cannot write to {output}",
            why="an archive is named oci:FILE",
            fix="say --output oci:image.tar",
        )
    return Path(path)


def _to_file(job: _Job, tag: str, path: Path, *, fresh: bool) -> Built:
    """Write the whole image, base included. A wheel's tree needs no engine for that."""
    if _is_plain(job.found):
        with _plain_base(job) as (wheel, ground), _layer_file(job, wheel) as layer:
            assert layer.path is not None
            whole = dataclasses.replace(ground, layers={layer.diff_id: layer.path})
            order = job.order("", wheel.base, tag)
            with assembled(whole, order, job.folders, fresh=fresh) as image:
                return _written(image, order, path)
    with open_engine() as engine, job.base(engine, pull=False) as (reference, base):
        order = job.order(reference, base, tag)
        base_of(engine, order)
        with _saved(engine, job, reference) as (whole, layers):
            known = dataclasses.replace(order, base_layers=layers)
            with assembled(whole, known, job.folders, fresh=fresh) as image:
                return _written(image, order, path)


def _written(image: Image, order: Order, path: Path) -> Built:
    built = described(image)
    require_expected(built, order.expect)
    write_archive(path, image)
    return built


@contextlib.contextmanager
def _saved(
    engine: Engine, job: _Job, reference: str
) -> Iterator[tuple[Ground, tuple[Descriptor, ...]]]:
    """The base's layers in files, taken out of the engine: slow, for a whole archive only."""
    base = Base.from_inspect(engine.inspect(reference) or {})
    job.folders.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.folders.work, prefix=".save-") as folder:
        archive = Path(folder, "base.tar")
        meter, done = _Meter("save"), 0
        with archive.open("wb") as out:
            for piece in engine.save(base.id):
                out.write(piece)
                meter(done := done + len(piece), 0)
        paths = _layers_of(archive, base, Path(folder))
        layers = tuple(
            Descriptor(digest=digest, size=path.stat().st_size)
            for digest, path in zip(base.diff_ids, paths, strict=True)
        )
        whole = dataclasses.replace(base, layers=layers)
        with engine.still(base.id) as still:
            yield (
                Ground(
                    base=whole,
                    files=Memory(still),
                    engine=engine,
                    layers=dict(zip(base.diff_ids, paths, strict=True)),
                ),
                layers,
            )


def _layers_of(archive: Path, base: Base, folder: Path) -> list[Path]:
    """The base's layers out of a saved tar, uncompressed, each with the digest that it must have.

    Raises:
        StaleLock: the engine saved other bytes than it says it holds.
    """
    paths: list[Path] = []
    with tarfile.open(archive) as tar:
        listed = tar.extractfile("manifest.json")
        names = json.load(listed)[0]["Layers"] if listed else []
        for number, name in enumerate(names):
            source = tar.extractfile(name)
            assert source is not None
            path = folder / f"{number}.tar"
            with source, path.open("wb") as out:
                # An engine that keeps layers compressed saves them so.
                packed = source.read(2) == b"\x1f\x8b"
                source.seek(0)
                plain = gzip.GzipFile(fileobj=source) if packed else source
                shutil.copyfileobj(plain, out, 1 << 20)
            paths.append(path)
    found = tuple("sha256:" + file_sha256(path) for path in paths)
    if found != base.diff_ids:
        raise StaleLock(
            "the engine saved another base than it shows",
            why=f"saved {', '.join(found)}, shown {', '.join(base.diff_ids)}",
            fix="pull the base again by its digest",
        )
    return paths


# --- small tools ----------------------------------------------------------------------------------


class _Meter:
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


def _put(path: Path, data: bytes, mode: int) -> None:
    """Write beside, then rename; a file that is right already is left alone."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == data and path.stat().st_mode & 0o777 == mode:
            return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.chmod(mode)
    beside.replace(path)


def _copy(source: Path, target: Path) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, beside)
    beside.chmod(0o644)
    beside.replace(target)
