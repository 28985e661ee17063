"""What a person asks for: manifests/NAME.yaml as frozen values, or every fault at once.

`load` and `choose` are this module's face. The classes below are the only description of the
format: reader, meaning, defaults and manifests/schema.json all come from them.

Within one schema number a default is never changed: fields at their default are not part of the
meaning, so a changed default would give two meanings one digest.
"""

# ruff: noqa: RUF009 - `key` gives dataclasses.field; the other defaults are frozen values

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from deploy import document, fields
from deploy.document import Faults
from deploy.errors import BadValues
from deploy.fields import EMPTY, Choice, Either, ListOf, MapOf, Record, key
from deploy.layout import HERE, Layout

SCHEMA = 1
EXAMPLE = "example"  # the annotated one; never deployed, so never chosen
FALLBACK = "demo"
VARIABLE = "DCU_MANIFEST"

_FIX = f"mend these lines; manifests/{EXAMPLE}.yaml explains every field"
_Found = Mapping[str, Any]
_Rules = Iterator[tuple[str, str]]

REASON = fields.TEXT
# What a kernel is compiled from in vLLM's tree; such paths are never installed as source.
KERNEL_SOURCES = (
    "csrc/**",
    "cmake/**",
    "CMakeLists.txt",
    "CMakePresets.json",
    "setup.py",
    "pyproject.toml",
    "requirements/**",
)


def _argv_of_flags(flags: Mapping[str, str]) -> tuple[str, ...]:
    """Return `--name value` words sorted by name; an empty value is a bare flag."""
    words: list[str] = []
    for name, value in sorted(flags.items()):
        words += [f"--{name}", value] if value else [f"--{name}"]
    return tuple(words)


_FLAG = fields.Scalar(
    "a flag's name without dashes",
    "[a-z][a-z0-9-]*",
    hint=lambda t: f"write {t.lstrip('-')}" if t.startswith("-") else "",
)
# A list keeps its order, which may count to the program; a mapping says that it does not.
ARGV = Either(
    ListOf(fields.TEXT, unique=False), MapOf(_FLAG, fields.ANY_TEXT), tuple, _argv_of_flags
)
OPS = Either(
    ListOf(fields.IDENTIFIER, least=1),
    MapOf(fields.IDENTIFIER, fields.ANY_TEXT, least=1),
    lambda names: fields.frozen_map((name, "") for name in names),
    lambda schemas: schemas,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What the target must be before the overlay."""

    image: str = key(
        fields.IMAGE, "the image the submission stands on; the lock pins its digest", ""
    )
    platform: str = key(fields.PLATFORM, "the image's platform", "linux/amd64")
    python: str = key(fields.ABSOLUTE, "the service's interpreter, as seen from the target's root")
    site: str = key(fields.ABSOLUTE, "the folder vLLM is installed in; never guessed")
    requires: Mapping[str, str] = key(
        MapOf(fields.DIST, fields.VERSION),
        "distributions the site must hold; a local version (+das.dtk2604) may follow",
        EMPTY,
    )
    env_script: str = key(fields.ABSOLUTE, "sourced before anything that imports torch", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """The pinned wheel whose tree is the base commit."""

    name: str = key(fields.DIST, "the distribution's name")
    version: str = key(fields.VERSION, "its version")
    sha256: str = key(fields.SHA256, "the sha256 of the wheel's file")
    platform: str = key(fields.TAG, "the platform tag to ask for, the same on every machine")
    python: str = key(fields.VERSION, "the Python version to ask for", "3.10")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the edits come from: two commits of a repository, or a wheel and a series of edits."""

    git: str = key(fields.FOLDER, "the repository, relative to this checkout", "")
    base: str = key(fields.COMMIT, "the commit the target's files come from", "")
    head: str = key(fields.COMMIT, "the commit to deploy", "")
    wheel: Wheel | None = key(Record(Wheel), "the wheel whose tree is the base", None)
    series: str = key(fields.RELATIVE, "the folder of edits on the wheel, like overlay/demo", "")
    package: str = key(fields.MODULE, "the top package that must be imported from the site")
    may_be_dirty: tuple[str, ...] = key(
        ListOf(fields.GLOB), "paths that builds rewrite; their differences do not refuse a plan", ()
    )

    SCHEMA_EXTRA: ClassVar[dict[str, Any]] = {
        "oneOf": [{"required": ["git", "base", "head"]}, {"required": ["wheel", "series"]}]
    }

    @staticmethod
    def rules(found: _Found) -> _Rules:
        form = "git" if "git" in found else "wheel"
        if ("git" in found) == ("wheel" in found):
            yield "wheel", "say either `git:` with base and head, or `wheel:` with series"
        else:
            own, other = _SOURCE_FORMS[form]
            for name in own:
                if name not in found:
                    yield form, f"`{form}:` needs {name!r} beside it"
            for name in other:
                if name in found:
                    yield name, f"{name!r} does not go with `{form}:`"
        series = found.get("series")
        if isinstance(series, str) and not series.startswith("overlay/"):
            yield "series", f"a series lies below overlay/, found {fields.shown(series)}"


# form of a source -> keys it needs, keys that belong to the other form
_SOURCE_FORMS = {
    "git": (("base", "head"), ("series",)),
    "wheel": (("series",), ("base", "head", "may_be_dirty")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Other bytes that a replaced file may have before the first deploy."""

    sha256: tuple[str, ...] = key(ListOf(fields.SHA256, least=1), "what the file may be")
    why: str = key(REASON, "where these bytes come from, and why replacing them is right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """Which paths of the difference are installed. Every path must find its class."""

    include: tuple[str, ...] = key(ListOf(fields.GLOB, least=1), "paths to install into the site")
    ignore: Mapping[str, str] = key(
        MapOf(fields.GLOB, REASON), "paths not to install, each with the reason", EMPTY
    )
    accept: Mapping[str, Variant] = key(
        MapOf(fields.RELATIVE, Record(Variant)), "files the base's vendor changed", EMPTY
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """One compiled module and what it must register. Empty names follow from the extension's."""

    ops: Mapping[str, str] = key(OPS, "op names, or op name -> schema, that must be registered")
    module: str = key(fields.MODULE, "the module to import; PACKAGE.NAME when not given", "")
    namespace: str = key(fields.IDENTIFIER, "the namespace of torch.ops; NAME when not given", "")
    target: str = key(fields.TAG, "the CMake target; NAME when not given", "")
    component: str = key(fields.TAG, "the CMake install component; NAME when not given", "")
    mode: str = key(fields.MODE, "the mode of the installed file", "0755")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ccache:
    """The compiler cache of kernel builds."""

    dir: str = key(fields.ABSOLUTE, "its folder, on local disk; outlives a rebuilt container", "")
    size: int = key(fields.SIZE, "its limit", 5 * 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How extensions are compiled, and what the result must be."""

    preset: str = key(fields.NAME, "the CMake preset to render and use")
    arch: str = key(fields.ARCH, "the only arch the binary may hold")
    extensions: Mapping[str, Extension] = key(
        MapOf(fields.IDENTIFIER, Record(Extension), least=1), "extensions by name, like _rocm_C"
    )
    sources: tuple[str, ...] = key(
        ListOf(fields.GLOB, least=1), "what they are compiled from; never installed", KERNEL_SOURCES
    )
    build_dir: str = key(fields.ABSOLUTE, "a folder on local disk", "/root/build")
    jobs: int = key(fields.COUNT, "compilers at a time; 0 or not given: one a core", 0)
    ccache: Ccache = key(Record(Ccache), "the compiler cache", Ccache())
    reproducible: bool = key(
        Choice({"reported": False, "required": True}),
        "whether a rebuild with other bytes is only reported, or a failure",
        default=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One custom environment variable; the contest voids a submission that does not list it."""

    value: str = key(fields.ANY_TEXT, "its value, as text")
    why: str = key(REASON, "what it is for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder of the host inside the container."""

    source: str = key(fields.ABSOLUTE, "the folder on the host")
    target: str = key(fields.ABSOLUTE, "where the container sees it")
    read_only: bool = key(fields.SWITCH, "whether the container may not write", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What `docker run` is told; devices that the host lacks are left out."""

    devices: tuple[str, ...] = key(ListOf(fields.ABSOLUTE), "device files to pass", ())
    mounts: tuple[Mount, ...] = key(ListOf(Record(Mount)), "folders to mount", ())
    shm_size: int = key(fields.SIZE, "shared memory", 16 * 2**30)
    groups: tuple[str, ...] = key(ListOf(fields.NAME), "groups to add", ())
    capabilities: tuple[str, ...] = key(ListOf(fields.IDENTIFIER), "capabilities to add", ())
    security: tuple[str, ...] = key(ListOf(fields.TEXT), "security options", ())
    ulimits: Mapping[str, str] = key(
        MapOf(fields.NAME, fields.Scalar("SOFT or SOFT:HARD", "-?[0-9]+(:-?[0-9]+)?")),
        "limits by name, like memlock: -1:-1",
        EMPTY,
    )
    network: str = key(fields.NAME, "the network", "host")
    ipc: str = key(fields.NAME, "the IPC namespace", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the service is started."""

    dir: str = key(fields.ABSOLUTE, "the working folder; imports are proven from here too")
    command: tuple[str, ...] = key(
        ListOf(fields.TEXT, least=1, unique=False), "the words before the model", ("vllm", "serve")
    )
    serve: tuple[str, ...] = key(
        ARGV, "flags as a mapping (order does not count) or words as a list", ()
    )
    port: int = key(fields.PORT, "the port to listen on", 8000)
    env: Mapping[str, Variable] = key(
        MapOf(fields.ENV_NAME, Record(Variable)), "custom variables, each with its reason", EMPTY
    )
    ready: int = key(fields.DURATION, "how long a start may take", 15 * 60)
    container: Container = key(Record(Container), "how the container is run", Container())

    @staticmethod
    def rules(found: _Found) -> _Rules:
        taken = {"--port": "launch.port", "--served-model-name": "model.served_name"}
        for word in found["serve"] if isinstance(found.get("serve"), tuple) else ():
            name = word.split("=", 1)[0]
            if name in taken:
                yield "serve", f"{name} is given by `{taken[name]}`; leave it out here"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """What one file of the model must be; at least one of the two."""

    size: int | None = key(fields.BYTES, "bytes", None)
    sha256: str = key(fields.SHA256, "compared in full only on request", "")

    @staticmethod
    def rules(found: _Found) -> _Rules:
        if not found:
            yield "", "say size, sha256 or both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that is served."""

    path: str = key(fields.ABSOLUTE, "its folder on the target")
    served_name: str = key(fields.TEXT, "the name that clients ask for")
    files: Mapping[str, ModelFile] = key(
        MapOf(fields.RELATIVE, Record(ModelFile)), "config, tokenizer, index and shards", EMPTY
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A line that must be logged, `selected=True`, while a request is served."""

    shape: str = key(fields.TEXT, "as logged, or `chunks`: every chunk that the plan predicts")
    dtype: str = key(fields.TEXT, "as logged; any when not given", "")
    phase: str = key(
        Choice({word: word for word in ("any", "prefill", "decode")}), "when it is seen", "any"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How it is proven that a request took the new code."""

    diag: str = key(
        Choice({word: word for word in ("same-process", "twin")}),
        "markers from the measured process, or from a twin started from the same lock",
        "same-process",
    )
    switch: str = key(fields.ENV_NAME, "the variable that turns the candidate on", "")
    off: str = key(fields.TEXT, "the value that turns it off", "0")
    markers: tuple[Marker, ...] = key(ListOf(Record(Marker), least=1), "the lines that must appear")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One set of requests."""

    dataset: str = key(fields.ABSOLUTE, "the .jsonl file on the target")
    sha256: str = key(fields.SHA256, "its content")
    requests: int = key(fields.COUNT, "how many of its rows are sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a measured run sends; two runs compare only when all of it is equal."""

    buckets: Mapping[str, Bucket] = key(
        MapOf(fields.Scalar("a bucket's name", "[A-Za-z0-9][A-Za-z0-9._-]*"), Record(Bucket), 1),
        "sets of requests by name, like 8-16K",
    )
    flags: tuple[str, ...] = key(ARGV, "further flags of `vllm bench serve`", ())
    script: str = key(fields.ABSOLUTE, "the site's run_throughput.sh, used instead", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How a profile is taken and read."""

    classes: Mapping[str, tuple[str, ...]] = key(
        MapOf(fields.NAME, ListOf(fields.TEXT, least=1), 1),
        "kernel classes: name -> patterns (*, ?) of kernel names; the longest that fits wins",
    )
    tool: str = key(fields.ABSOLUTE, "the profiler", "/opt/dtk/bin/hipprof")
    library_path: tuple[str, ...] = key(
        ListOf(fields.ABSOLUTE), "folders the profiler needs before LD_LIBRARY_PATH", ()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Which gates cannot apply to this submission."""

    not_applicable: Mapping[str, str] = key(
        MapOf(fields.Scalar("a gate from 2 to 7", "[2-7]"), REASON), "gate -> reason", EMPTY
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A submission, as asked for."""

    schema: int = key(
        fields.Scalar(f"{SCHEMA}, the only schema so far", str(SCHEMA), int), "the format's number"
    )
    name: str = key(fields.NAME, "the same as the file's, without .yaml")
    base: Base = key(Record(Base), "the target before the overlay")
    source: Source = key(Record(Source), "where the edits come from")
    overlay: Overlay = key(Record(Overlay), "what is installed")
    kernels: Kernels | None = key(Record(Kernels), "what is compiled", None)
    launch: Launch | None = key(Record(Launch), "how the service is started", None)
    model: Model | None = key(Record(Model), "what is served", None)
    dispatch: Dispatch | None = key(Record(Dispatch), "how dispatch is proven", None)
    bench: Bench | None = key(Record(Bench), "how it is measured", None)
    profile: Profile | None = key(Record(Profile), "how it is profiled", None)
    gates: Gates = key(Record(Gates), "gates that cannot apply, with reasons", Gates())

    @property
    def kernel_sources(self) -> tuple[str, ...]:
        """Globs of paths that are compiled and never installed, with or without `kernels:`."""
        return self.kernels.sources if self.kernels else KERNEL_SOURCES

    def meaning(self) -> dict[str, Any]:
        """Return the canonical JSON value: no comments, order, quoting, or defaults spelled out."""
        found = fields.plain(self)
        assert isinstance(found, dict)
        # Where a clone lies on this machine is no part of what it holds: the commit ids pin that.
        found["source"].pop("git", None)
        return found

    def serve_argv(self) -> tuple[str, ...]:
        """Return the words that start the service. Raises BadValues when nothing is launched."""
        if self.launch is None:
            raise BadValues(
                f"cannot start {self.name}",
                why="its manifest has no `launch:`",
                fix=f"add it to manifests/{self.name}.yaml; {EXAMPLE}.yaml shows one",
            )
        model: tuple[str, ...] = ()
        if self.model is not None:
            model = (self.model.path, "--served-model-name", self.model.served_name)
        return (*self.launch.command, *model, "--port", str(self.launch.port), *self.launch.serve)


def load(path: Path) -> Manifest:
    """Return the manifest of a file. Raises one BadValues that lists every fault with its place."""
    root, faults = document.read(path, _FIX)
    return _manifest(root, faults, path.stem)


def parse(text: str, name: str) -> Manifest:
    """Like `load`, for a text that would stand in manifests/NAME.yaml."""
    root, faults = document.parse(
        text.encode("utf-8", "surrogatepass"), f"manifests/{name}.yaml", _FIX
    )
    return _manifest(root, faults, name)


def _manifest(root: document.Node, faults: Faults, stem: str) -> Manifest:
    found = Record(Manifest).read(root, faults)
    if isinstance(root, document.Map) and "name" in root.entries:
        typed = root.entries["name"][1]
        if isinstance(typed, document.Text) and typed.value != stem:
            faults.add(typed.at, f"the name must be the file's: {stem!r}")
    faults.raise_any()
    assert isinstance(found, Manifest)
    return _named(found)


def _named(manifest: Manifest) -> Manifest:
    """Fill in the names of extensions that follow from others."""
    if manifest.kernels is None:
        return manifest
    extensions = fields.frozen_map(
        (name, _named_extension(manifest.source.package, name, ext))
        for name, ext in manifest.kernels.extensions.items()
    )
    kernels = dataclasses.replace(manifest.kernels, extensions=extensions)
    return dataclasses.replace(manifest, kernels=kernels)


def _named_extension(package: str, name: str, extension: Extension) -> Extension:
    return dataclasses.replace(
        extension,
        module=extension.module or f"{package}.{name}",
        namespace=extension.namespace or name,
        target=extension.target or name,
        component=extension.component or name,
    )


def names(layout: Layout = HERE) -> tuple[str, ...]:
    """Return the names of all manifests, sorted, without the annotated example."""
    found = (path.name[: -len(".yaml")] for path in layout.manifest("*").parent.glob("*.yaml"))
    return tuple(sorted(n for n in found if not n.endswith(".lock") and n != EXAMPLE))


def choose(
    name: str = "",
    layout: Layout = HERE,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Return the manifest to use: the one given, else DCU_MANIFEST's, else the only one, else demo.

    Raises BadValues when that one does not exist, or when none of these says which.
    """
    known = names(layout)
    for wanted, origin in ((name, "given"), (environ.get(VARIABLE, ""), f"from {VARIABLE}")):
        if wanted:
            return _existing(wanted, origin, known)
    if len(known) == 1:
        return known[0]
    if FALLBACK in known:
        return FALLBACK
    raise BadValues(
        "no manifest was named",
        why=f"there are {', '.join(known)}" if known else "manifests/ holds none",
        fix=f"say -n NAME, or set {VARIABLE}",
    )


def _existing(wanted: str, origin: str, known: tuple[str, ...]) -> str:
    if wanted in known or wanted == EXAMPLE:
        return wanted
    shown = fields.shown(wanted)
    meant = fields.did_you_mean(wanted, known)
    raise BadValues(
        f"there is no manifest {shown} ({origin}){meant}",
        why=f"manifests/ holds {', '.join(known) or 'none'}",
        fix="name one of these, or write manifests/NAME.yaml after manifests/example.yaml",
    )


def schema_text() -> str:
    """Return the text of manifests/schema.json, for editors."""
    top = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "manifests/NAME.yaml",
    }
    return json.dumps(top | Record(Manifest).schema(), indent=2, ensure_ascii=False) + "\n"


def main(argv: list[str], write: Callable[[str], Any] = sys.stdout.write) -> int:
    """`python -m deploy.manifest --schema` prints manifests/schema.json."""
    if argv != ["--schema"]:
        write("usage: python -m deploy.manifest --schema > manifests/schema.json\n")
        return 2
    write(schema_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
