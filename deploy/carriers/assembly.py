"""An image from a bundle: look into the base, compile, write the layer, load it, believe nothing.

`build` is this module's face. The ids are predicted from the bytes and then compared with what the
engine says; an image whose ids differ is taken out of the engine again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from deploy.agent.plan import Plan
from deploy.agent.words import digest
from deploy.bundle import Bundle
from deploy.carriers.engine import NAME, Ended, Engine, Progress, Store
from deploy.errors import Differs, Unfit
from deploy.image import base as bases
from deploy.image import bytecode, record
from deploy.image.archive import Image, Reference, archive_size, descriptors, stream
from deploy.image.base import Files, Memory, Pin, Seen, resolve
from deploy.image.beside import beside
from deploy.image.config import Added, Base, Descriptor, config_document, content_id
from deploy.image.layer import Entry, Layer, confirm, write_layer
from deploy.image.overlay import Contents, Extra, entries
from deploy.scripts import Rendered

# A change of the encoder may change ids with every input equal; it is then the first suspect.
ENCODER = "image/2"
# The bundle's name in launch.dir of an image; a name with its digest would change with every agent.
BUNDLE = "bundle.pyz"
# Bytes of one content that an image holds twice, as a file and in that bundle. Every source is
# smaller; what is bigger was compiled, and is nothing that a person edits by hand.
CARRIED_TWICE = 1 << 20

_LIST_INSTALLED = (
    "import os, sys; "
    "sys.stdout.write('\\0'.join(n for n in os.listdir(sys.argv[1]) if n.endswith('.dist-info')))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to build. `epoch` is the head commit's time; `extras` lie beside the site.

    `pin` is the base as locked; without one the engine's `base` is taken as it is.
    """

    bundle: Bundle
    base: str
    reference: Reference
    epoch: int
    pin: Pin | None = None
    base_layers: tuple[Descriptor, ...] = ()  # the base's blobs, where somebody knows them
    extras: tuple[Extra, ...] = ()
    expect: Mapping[str, str] = field(default_factory=dict)  # the ids that a lock pins, if any
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def added(self) -> Added:
        labels = {
            NAME: self.bundle.plan.name,
            "dcu-bundle.plan": self.bundle.plan.digest,
            "dcu-bundle.inputs": digest(self.bundle.inputs),
            "dcu-bundle.bundle": self.bundle.sha256,
            **self.labels,
        }
        return Added(note=f"dcu-bundle {self.bundle.plan.name}", labels=labels)

    @property
    def base_name(self) -> str:
        """The base as the manifest names it, the same on every machine."""
        asked = (self.bundle.inputs.get("manifest") or {}).get("base") or {}
        return str(asked.get("image") or "")

    def key(self, base: Base) -> str:
        """One digest over everything that the image follows from."""
        return digest(
            {
                "encoder": ENCODER,
                "bundle": self.bundle.sha256,
                "base": [list(base.diff_ids), base.run_config, base.platform],
                "reference": str(self.reference),
                "epoch": self.epoch,
                "extras": [[e.path, e.sha256, e.mode] for e in self.extras],
                "labels": dict(self.added.labels),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One image in an engine, and every id that it has or would have in another."""

    reference: str
    id: str
    layer: str
    config: str
    content: str
    base: tuple[str, ...]
    run_config: str
    manifest: str = ""  # empty where the base's blobs are not known
    size: int = 0  # bytes of our layer
    unchanged: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"schema": "image/1", **dataclasses.asdict(self), "base": list(self.base)}

    @property
    def text(self) -> str:
        """What a person wants to read of it."""
        state = "is there already" if self.unchanged else "loaded" if self.id else "written"
        rows = {"image": f"{self.reference} ({state})", "id": self.id, **self.expect}
        return "\n".join(f"{name:<11} {value}" for name, value in rows.items() if value)

    @property
    def expect(self) -> dict[str, str]:
        """The part that a lock pins: the same on every engine."""
        return {
            "layer": self.layer,
            "config": self.config,
            "manifest": self.manifest,
            "content": self.content,
            "run_config": self.run_config,
        }


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a build leaves things: `work` its record, `cache` what base images hold."""

    work: Path
    cache: Path


def handed_in(bundle: Bundle, rendered: Sequence[Rendered]) -> tuple[Extra, ...]:
    """What lies in launch.dir of an image: the scripts, and the bundle without its big contents."""
    folder = bundle.plan.launch_dir
    if not folder:
        return ()
    return (
        Extra.held(f"{folder}/{BUNDLE}", _light(bundle)),
        *(Extra.held(f"{folder}/{one.name}", one.data, one.mode) for one in rendered),
    )


def _light(bundle: Bundle) -> bytes:
    """The bundle without what would double the image: it verifies, starts and mends sources."""
    out = io.BytesIO()
    with zipfile.ZipFile(bundle.path) as whole, zipfile.ZipFile(out, "w") as light:
        for info in whole.infolist():
            if not info.filename.startswith("blobs/") or info.file_size <= CARRIED_TWICE:
                light.writestr(info, whole.read(info))
    return out.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What an image is assembled on: the base, its files, and who runs its Python, if any can."""

    base: Base
    files: Memory
    engine: Engine | None = None
    layers: Mapping[str, Path] = field(default_factory=dict)  # the base's own blobs, at hand


def build(
    engine: Engine,
    order: Order,
    folders: Folders,
    *,
    progress: Progress | None = None,
    looking: Progress | None = None,
    fresh: bool = False,
    output: Path | None = None,
) -> Built:
    """Build and load an image; do nothing when it is there already. `fresh` believes no cache.

    `output` names a file for the archive that was loaded (thin: it needs the base beside it);
    `looking` is told the bytes that are read to learn what blobs the base is kept in.

    Raises:
        Unfit, StaleLock: the base is absent, or not the pinned one; nothing was written.
        Refused: a replaced file is not what the plan assumes; nothing was written.
        Differs: the ids are not the locked ones, and nothing was loaded; or the engine shows others
            than predicted, and the image was removed again.
    """
    base = base_of(engine, order)
    record = folders.work / "image.json"
    if not fresh and output is None and (known := _unchanged(engine, record, order, base)):
        require_expected(known, order.expect)
        return known
    with _withdrawn_on_doubt(engine, order.reference):
        with (
            _ground(engine, base, folders, looking, fresh=fresh) as ground,
            assembled(ground, order, folders, fresh=fresh) as image,
        ):
            _require_loadable(engine, image)
            require_expected(described(image), order.expect)
            size, name = archive_size(image), str(image.reference)
            engine.load(stream(image), size, progress, reference=name)
            built = _checked(engine, image)
            if output is not None:
                write_archive(output, image)
        _remember(record, order.key(base), built)
    return built


def predicted(engine: Engine, order: Order, folders: Folders) -> Built:
    """What `build` would make of this, as far as it can be said without loading it.

    Raises:
        Unfit, StaleLock, Refused: the base is none for it.
    """
    base = base_of(engine, order)
    with (
        _ground(engine, base, folders, None, fresh=False) as ground,
        assembled(ground, order, folders) as image,
    ):
        return described(image)


@contextlib.contextmanager
def _withdrawn_on_doubt(engine: Engine, reference: Reference) -> Iterator[None]:
    """Take the image out again, and give its name back, unless all went well to the end.

    The layer's second reader speaks last, and a person may interrupt after the load.
    """
    before = (engine.inspect(str(reference)) or {}).get("Id")
    try:
        yield
    except BaseException:
        now = (engine.inspect(str(reference)) or {}).get("Id")
        if now not in (None, before):
            if before is not None:
                engine.tag(before, reference.name, reference.tag)
            engine.remove_image(now if before else str(reference))
        raise


def base_of(engine: Engine, order: Order) -> Base:
    """The base as the engine holds it. Raises Unfit or StaleLock when it is not the pin."""
    found = engine.inspect(order.base)
    if found is None:
        raise Unfit(
            f"the engine has no base image {order.base}",
            why="an image is assembled on a base that the engine holds",
            fix=f"`docker pull {order.base}` (by the locked digest), or load its archive",
        )
    base = Base.from_inspect(found)
    if order.pin is not None:
        bases.check_pin(order.pin, base)
    if tuple(layer.digest for layer in order.base_layers) == base.diff_ids:
        base = dataclasses.replace(base, layers=order.base_layers)
    return base


def require_expected(built: Built, expect: Mapping[str, str]) -> None:
    """Raise Differs, naming the first rung, unless every pinned id is the built one."""
    for rung in ("run_config", "layer", "config", "manifest", "content"):
        want, found = expect.get(rung, ""), built.expect[rung]
        if want and found and want != found:
            raise Differs(
                f"the first rung of the image that diverged from the lock: {rung}",
                why=f"locked {want}, found {found}",
                fix=_SUSPECTS[rung],
            )


_SUSPECTS = {
    "run_config": "the base's Env, Entrypoint, Cmd, User or WorkingDir changed: compare the bases",
    "layer": "first suspects: this product's version, the base's Python, a rendered script; if the "
    "new one is right, run `./inv lock`",
    "config": "the layers are equal, so a label or the base's config differs",
    "manifest": "the config is equal, so the base's blobs are encoded in another way",
    "content": "this is a bug: all that it follows from is equal",
}


def _require_loadable(engine: Engine, image: Image) -> None:
    """A content store follows the manifest to the base's blobs, so they must be named rightly."""
    if engine.store is Store.CONTAINERD and not image.complete:
        raise Unfit(
            "this engine keeps images in containerd, and does not tell in which blobs the base is",
            why="what it saves of the base holds no manifest with these layers; an image loaded"
            " without their digests and sizes cannot be saved or built upon",
            fix="pull the base again, or build the rendered Dockerfile there",
        )


def _with_blobs(engine: Engine, base: Base, files: Memory, looking: Progress | None) -> Base:
    """The base with its blobs as a content store keeps them: compressed, as they were pulled.

    Inspect does not show them, and a registry may be out of reach; what the engine saves names
    them. An engine with the classic store has no such blobs, and saves slowly.
    """
    if engine.store is not Store.CONTAINERD or len(base.layers) == len(base.diff_ids):
        return base

    def ask() -> tuple[str, ...]:
        with engine.saving(base.id, looking) as saved:
            return tuple(
                json.dumps([blob.digest, blob.size, blob.media_type])
                for blob in descriptors(saved, base.diff_ids)
            )

    rows = [json.loads(text) for text in files.learn("blobs of the base", ask)]
    layers = tuple(Descriptor(digest=d, size=size, media_type=kind) for d, size, kind in rows)
    return dataclasses.replace(base, layers=layers)


@contextlib.contextmanager
def _ground(
    engine: Engine, base: Base, folders: Folders, looking: Progress | None, *, fresh: bool
) -> Iterator[Ground]:
    cache = None if fresh else folders.cache / f"{base.id.removeprefix('sha256:')}.json"
    with contextlib.ExitStack() as stack:
        files = Memory(_Lazy(engine, base.id, stack), cache)
        known = _with_blobs(engine, base, files, looking)
        yield Ground(base=known, files=files, engine=engine)


@contextlib.contextmanager
def assembled(
    ground: Ground, order: Order, folders: Folders, *, fresh: bool = False
) -> Iterator[Image]:
    """The image as bytes; its layer lies in a temporary file that is gone afterwards."""
    plan, files, base = order.bundle.plan, ground.files, ground.base
    site = bases.site_of(files, plan)
    compiler = _Compiler(
        engine=ground.engine,
        image=base.id,
        python=_python(files, plan),
        cache=None if fresh else folders.cache / "pycs",
    )
    bases.require(files, site, plan, compiler.installed(files, site))
    record.require_pristine(files, site)
    cleared = bases.Cleared(files, site, plan)
    bases.judge(cleared, site, plan)
    with _blobs(order.bundle) as blobs:
        python, pycs = compiler.compile(plan, blobs)
        contents = Contents(
            plan=plan,
            site=site,
            blobs=blobs,
            pycs=pycs,
            python=python,
            said=record.said(plan, digest(order.bundle.inputs), order.base_name, order.epoch),
            extras=order.extras,
        )
        with _layer(contents, cleared, order, folders.work) as layer:
            files.keep()
            config = config_document(base, layer.diff_id, order.added, epoch=order.epoch)
            yield Image(
                reference=order.reference,
                base=base,
                layer=layer,
                config=config,
                base_layers=ground.layers,
            )


class _Lazy:
    """Files of an image that make their container at the first question, if there is one."""

    def __init__(self, engine: Engine, image: str, stack: contextlib.ExitStack) -> None:
        self._engine, self._image, self._stack = engine, image, stack
        self._still: Files | None = None

    def look(self, path: str) -> Seen:
        return self._files().look(path)

    def names(self, folder: str) -> tuple[str, ...]:
        return self._files().names(folder)

    def other(self, folder: str, known: Collection[str]) -> str:
        return self._files().other(folder, known)

    def _files(self) -> Files:
        if self._still is None:
            self._still = self._stack.enter_context(self._engine.still(self._image))
        return self._still


_Openers = Mapping[str, Callable[[], IO[bytes]]]


@contextlib.contextmanager
def _blobs(bundle: Bundle) -> Iterator[_Openers]:
    """The contents that a bundle carries, by sha256, each opened on demand."""
    with zipfile.ZipFile(bundle.path) as archive:
        yield {sha: partial(archive.open, f"blobs/{sha}") for sha in bundle.plan.blobs()}


def _python(files: Files, plan: Plan) -> str:
    """The plan's interpreter, or "" in an image that has none."""
    real = resolve(files, plan.python)
    return plan.python if files.look(real).kind == "file" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiler:
    """Makes pycs by the image's own Python; what it made before of the same bytes is kept."""

    engine: Engine | None
    image: str
    python: str  # "" in an image that has none: nothing is compiled
    cache: Path | None

    def installed(self, files: Memory, site: str) -> tuple[str, ...]:
        """The names of the site's dist-info folders; none where no Python can list them."""

        def ask() -> tuple[str, ...]:
            ended = self._run((self.python, "-I", "-S", "-c", _LIST_INSTALLED, site), ())
            return tuple(sorted(ended.out.decode("utf-8", "replace").split("\0")))

        return files.learn(f"{site}/*.dist-info", ask) if self.python else ()

    def compile(self, plan: Plan, blobs: _Openers) -> tuple[dict[str, str], dict[str, bytes]]:
        """Return what the interpreter is, and the pyc of each module that the plan compiles."""
        if not self.python:
            return {}, {}
        program = bytecode.program(self.python)
        wanted = {entry.path: entry.want.sha256 for entry in plan.files if entry.compiled}
        keys = {
            path: digest([self.image, list(program), plan.site, path, sha])
            for path, sha in wanted.items()
        }
        named = digest([self.image, list(program)]) + ".json"
        python, pycs = self._kept(named, keys)
        sources = {path: _read(blobs[wanted[path]]) for path in wanted if path not in pycs}
        if sources:
            ended = self._run(program, [bytecode.question(plan.site, sources)])
            python, made = bytecode.answer(tuple(sources), ended.out, ended.err)
            self._keep({f"{keys[path]}.pyc": body for path, body in made.items()})
            self._keep({named: json.dumps(python).encode()})
            pycs.update(made)
        return python, dict(sorted(pycs.items()))

    def _run(self, argv: Sequence[str], stdin: Iterable[bytes]) -> Ended:
        if self.engine is None:
            raise Unfit(
                "the image's Python cannot be asked",
                why="its bytecode is made by itself, and no container engine is in use",
                fix="build where an engine runs, without --output oci:",
            )
        return self.engine.run(self.image, argv, stdin)

    def _kept(self, named: str, keys: Mapping[str, str]) -> tuple[dict[str, str], dict[str, bytes]]:
        """The interpreter (kept as `named`) and those pycs that were made before, or nothing."""
        if self.cache is None or not (self.cache / named).is_file():
            return {}, {}
        names = set(os.listdir(self.cache))
        there = {path: f"{key}.pyc" for path, key in keys.items() if f"{key}.pyc" in names}
        python = json.loads((self.cache / named).read_bytes())
        return python, {path: (self.cache / name).read_bytes() for path, name in there.items()}

    def _keep(self, files: Mapping[str, bytes]) -> None:
        if self.cache is not None:
            for name, data in files.items():
                _replace(self.cache / name, data)


def _read(opener: Callable[[], IO[bytes]]) -> bytes:
    with opener() as source:
        return source.read()


def _confirmed(found: Sequence[Entry], layer: str) -> None:
    with open(layer, "rb") as again:
        confirm(found, again)


@contextlib.contextmanager
def _layer(contents: Contents, files: Files, order: Order, work: Path) -> Iterator[Layer]:
    """Our layer in a temporary file, read back by another reader before anyone believes it."""
    found, folders = entries(contents, files)
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=work, prefix=".layer-", suffix=".tar") as file:
        layer = write_layer(found, file, epoch=order.epoch, folders=folders)
        file.flush()
        # The second reader runs beside the engine, which reads the same bytes; the block ends with
        # its verdict, and nobody believes the image before.
        with ThreadPoolExecutor(1) as reader:
            verdict = reader.submit(_confirmed, found, file.name)
            yield dataclasses.replace(layer, path=Path(file.name))
            verdict.result()


def _checked(engine: Engine, image: Image) -> Built:
    """What the engine made of it; when that is not the prediction: remove it, raise Differs."""
    found = engine.inspect(str(image.reference)) or {}
    store = engine.store
    expected = image.manifest_id if store is Store.CONTAINERD else image.config_id
    layers = [*image.base.diff_ids, image.layer.diff_id]
    faults = []
    if found.get("Id") != expected:
        faults.append(f"predicted the id {expected}, the engine shows {found.get('Id')}")
    if (found.get("RootFS") or {}).get("Layers") != layers:
        faults.append("its layers are not the base's and ours")
    if faults:
        engine.remove_image(str(image.reference))
        raise Differs(
            f"the engine made another image of {image.reference}",
            why="; ".join(faults),
            fix="the image was removed again; run with --json and report both ids",
        )
    return described(image, str(found["Id"]))


def described(image: Image, identity: str = "") -> Built:
    """Every id of an image; `identity` is the one an engine shows, where one holds it."""
    config = json.loads(image.config)
    layers = config["rootfs"]["diff_ids"]
    made = Base(diff_ids=tuple(layers), config=config["config"])
    return Built(
        reference=str(image.reference),
        id=identity,
        layer=image.layer.diff_id,
        config=image.config_id,
        manifest=image.manifest_id if image.complete else "",
        content=content_id(layers, config["config"], config["architecture"]),
        base=image.base.diff_ids,
        run_config=made.run_config,
        size=image.layer.size,
    )


def _unchanged(engine: Engine, record: Path, order: Order, base: Base) -> Built | None:
    """The image of an earlier build, when nothing that it follows from has changed."""
    try:
        raw = json.loads(record.read_text(encoding="utf-8"))
        built = Built(**{**raw["built"], "base": tuple(raw["built"]["base"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    there = engine.inspect(str(order.reference))
    if raw.get("key") != order.key(base) or there is None or there["Id"] != built.id:
        return None
    return dataclasses.replace(built, unchanged=True)


def _remember(record: Path, key: str, built: Built) -> None:
    raw = {"key": key, "built": dataclasses.asdict(built)}
    _replace(record, json.dumps(raw, indent=1, sort_keys=True).encode())


def _replace(path: Path, data: bytes) -> None:
    with beside(path) as new:
        new.write_bytes(data)


def write_archive(path: Path, image: Image) -> None:
    """Write the image as one file that `docker load`, podman and buildah take."""
    with beside(path) as new, new.open("wb") as out:
        for piece in stream(image):
            out.write(piece)


__all__ = [
    "BUNDLE",
    "Built",
    "Folders",
    "Ground",
    "Order",
    "assembled",
    "base_of",
    "build",
    "described",
    "handed_in",
    "require_expected",
    "write_archive",
]
