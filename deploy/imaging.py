"""What an operator can ask for about images: build one from the lock, render, clean up.

The same sentence as in `deploy.flow`, with an image at its end; what a lock pins of it is made in
`deploy.pinning`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy import flow
from deploy.agent.plan import ABSENT, State, tree_digest
from deploy.agent.tree import chain
from deploy.bundle import Bundle, file_sha256
from deploy.carriers.assembly import (
    BUNDLE,
    Built,
    Ground,
    Order,
    assembled,
    base_of,
    build,
    described,
    require_expected,
    write_archive,
)
from deploy.carriers.engine import NAME, Engine, open_engine
from deploy.console import say
from deploy.errors import BadValues, StaleLock
from deploy.image.archive import Image, Reference
from deploy.image.base import Memory, resolve
from deploy.image.beside import beside
from deploy.image.config import Base, Descriptor, content_id
from deploy.image.plain import LABEL
from deploy.layout import HERE, Layout
from deploy.lock import read_lock
from deploy.pinning import PREFIX, Job, Meter, is_plain, layer_file, plain_base, rendered


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
    job = Job(found, made, read_lock(layout.lock(found.name)))
    if output:
        return _to_file(job, tag, _archive_path(output), fresh=fresh)
    with open_engine() as engine, job.base(engine, pull=pull) as (reference, base):
        order = job.order(reference, base, tag)
        load, look = Meter("load"), Meter("look")
        return build(engine, order, job.folders, progress=load, looking=look, fresh=fresh)


def build_dockerfile(name: str, layout: Layout = HERE, *, tag: str = "") -> Built:
    """Build the rendered Dockerfile with the engine's classic builder, on the locked base.

    Its layers are encoded by the builder, so their ids say nothing; what it shares with the loaded
    image is the tree that verify reads inside, and the run config.
    """
    from deploy.carriers import recipe

    found, _ = flow.bundle(name, layout)
    render(name, layout)
    reference = Reference.parse(tag or f"{PREFIX}{found.name}:dockerfile")
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
    job = Job(found, made, pinned)
    want = dict(pinned.expect.get("image") or {})
    with open_engine() as engine, job.base(engine, pull=False) as (reference, base):
        order = dataclasses.replace(job.order(reference, base, tag), expect={})
        load, look = Meter("load"), Meter("look")
        built = build(engine, order, job.folders, progress=load, looking=look, fresh=True)
        tree = _tree_inside(engine, built.reference, made)
    if found.wheel is not None and is_plain(found):
        links += flow.compare([("base image", ",".join(base.diff_ids), ",".join(built.base))])
    rungs = ("layer", "config", "manifest", "content", "run_config")
    # Where a base's blobs are not told, nobody can say the manifest.
    known = [rung for rung in rungs if want.get(rung) and built.expect[rung]]
    links += flow.compare([(f"image {r}", want[r], built.expect[r]) for r in known])
    shown = built.config if built.id == built.config else built.manifest
    links += flow.compare([("image id", shown, built.id)])
    links += flow.compare([("tree inside", str(pinned.expect.get("tree", "")), tree)])
    return built, links


def _tree_inside(engine: Engine, reference: str, made: Bundle) -> str:
    """The tree digest as the files of a container show it; no program of the image takes part."""
    plan = made.plan
    above = {folder for entry in plan.files for folder in chain(entry.path)}
    with engine.still(reference) as still:
        site = resolve(still, plan.site)

        def state(path: str) -> State:
            seen = still.look(f"{site}/{path}")
            # A file that became a folder is gone; what the folder holds has entries of its own.
            return ABSENT if seen.kind == "folder" and path in above else seen.state

        return tree_digest((entry.path, state(entry.path)) for entry in plan.files)


def render(name: str, layout: Layout = HERE, *, output: str = "") -> list[Path]:
    """Write the rendered files into a folder, beside the bundle that they run; return their paths.

    The folder is a build context: ``docker build FOLDER``.
    """
    found, made = flow.bundle(name, layout)
    folder = Path(output) if output else found.out / "rendered"
    folder.mkdir(parents=True, exist_ok=True)
    pinned = read_lock(layout.lock(found.name))
    paths = []
    for one in rendered(found, pinned):
        _put(folder / one.name, one.data, one.mode)
        paths.append(folder / one.name)
    if not found.manifest.base.image:
        say(f"{found.name}: no Dockerfile and no docker-run.sh: the manifest names no base.image")
    _copy(made.path, folder / BUNDLE)
    return [*paths, folder / BUNDLE]


def gc(*, yes: bool = False) -> list[dict[str, Any]]:
    """List what calls of this product left: containers of dead calls, images of older builds, and
    bases that were made here; remove it with `yes`.

    An image that was built last for its manifest stays, and so does one that a container uses.
    """
    rows = []
    with open_engine() as engine:
        dead = [one["Id"] for one in engine.left_over()]
        used = engine.used_images(but=dead)
        for container in dead:
            if yes:
                engine.remove_container(container)
            rows.append({"kind": "container", "id": container, "kept": "", "removed": yes})
        for image in [*_superseded(engine.images(NAME)), *_bases(engine.images(LABEL))]:
            why = "a container uses it" if image["Id"] in used else ""
            if yes and not why:
                why = engine.remove_image(image["Id"])
            removed = yes and not why
            rows.append({"kind": "image", "id": image["Id"], "kept": why, "removed": removed})
    return rows


def _superseded(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Images of ours that no tag names any more: a later build took the name."""
    return [one for one in images if not _tags(one)]


def _bases(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bases of ours, which are made again when they are needed; images on them are none."""
    return [one for one in images if NAME not in (one.get("Labels") or {})]


def _tags(image: Mapping[str, Any]) -> list[str]:
    return [tag for tag in image.get("RepoTags") or () if tag != "<none>:<none>"]


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


def _to_file(job: Job, tag: str, path: Path, *, fresh: bool) -> Built:
    """Write the whole image, base included. A wheel's tree needs no engine for that."""
    if is_plain(job.found):
        with plain_base(job) as (wheel, ground), layer_file(job, wheel) as layer:
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
    engine: Engine, job: Job, reference: str
) -> Iterator[tuple[Ground, tuple[Descriptor, ...]]]:
    """The base's layers in files, taken out of the engine: slow, for a whole archive only."""
    base = Base.from_inspect(engine.inspect(reference) or {})
    job.folders.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.folders.work, prefix=".save-") as folder:
        archive = Path(folder, "base.tar")
        meter, done = Meter("save"), 0
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


def _put(path: Path, data: bytes, mode: int) -> None:
    """Write beside, then rename; a file that is right already is left alone."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == data and path.stat().st_mode & 0o777 == mode:
            return
    with beside(path) as new:
        new.write_bytes(data)
        new.chmod(mode)


def _copy(source: Path, target: Path) -> None:
    with beside(target) as new:
        shutil.copyfile(source, new)
        new.chmod(0o644)
