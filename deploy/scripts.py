"""Manifest -> the files that a person runs on a target, as text with every value quoted.

`files` is this module's face. The templates below docker/ hold the words; what has to be decided is
decided here, in one frozen view. Those that follow from the manifest alone lie in every bundle and
image, so no file holds a digest of the bundle: each looks for the one bundle beside itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import BadValues
from deploy.layout import HERE
from deploy.manifest import Bench, Container, Launch, Manifest, Mount, Profile
from deploy.render import render

TEMPLATES = HERE.top / "docker"
# What lies in the bundle, and in launch.dir of an image or a target. A host that has only the image
# takes docker-run.sh out of it; the recipe for an image is of no use inside.
ON_TARGET = (
    "ENVIRONMENT.md",
    "docker-run.sh",
    "profile.sh",
    "run_throughput.sh",
    "start_vllm.sh",
    "stop_vllm.sh",
    "verify.sh",
)
_TEMPLATE = {".dockerignore": "dockerignore.j2"}


@dataclass(frozen=True, slots=True)
class Rendered:
    """One file: its name, permission bits, and bytes."""

    name: str
    mode: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Named:
    """A variable or a bucket, as a row of a template's list."""

    name: str
    value: str = ""
    why: str = ""
    dataset: str = ""
    sha256: str = ""
    requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that the templates may say."""

    name: str
    image: str
    base: str
    user: str
    python: str
    env_script: str
    scripts: tuple[str, ...]
    launch_dir: str = ""
    argv: tuple[str, ...] = ()
    command_lines: tuple[str, ...] = ()
    host: str = ""
    port: int = 0
    ready: int = 0
    ranks: int = 1
    shm_kib: int = 0
    env: tuple[Named, ...] = ()
    options: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    buckets: tuple[Named, ...] = ()
    bench_argv: tuple[str, ...] = ()
    script: str = ""
    tool: str = ""
    library_path: tuple[str, ...] = ()


def files(
    manifest: Manifest, *, base: str = "", user: str = "", templates: Path = TEMPLATES
) -> tuple[Rendered, ...]:
    """Return every file that the manifest has the sections for, sorted by name.

    `base` is the base image by digest, where it is known; `user` the one it runs as, unless root.

    Raises:
        BadValues: a value that a template cannot say.
    """
    view = _view(manifest, base, user)
    names = sorted(_names(manifest))
    if "Dockerfile" in names:
        _check_recipe(view)
    return tuple(_rendered(name, view, templates) for name in names)


def on_target(manifest: Manifest) -> tuple[Rendered, ...]:
    """Return the files that belong into launch.dir and into the bundle, sorted by name."""
    view = _view(manifest, "", "")
    return tuple(_rendered(name, view, TEMPLATES) for name in view.scripts)


def pinned(rendered: tuple[Rendered, ...]) -> dict[str, dict[str, str]]:
    """Return what a lock says of them: name -> mode (octal) and sha256."""
    return {
        one.name: {"mode": f"{one.mode:04o}", "sha256": hashlib.sha256(one.data).hexdigest()}
        for one in rendered
    }


def _rendered(name: str, view: View, templates: Path) -> Rendered:
    mode = 0o755 if name.endswith(".sh") else 0o644
    return Rendered(name, mode, render(_TEMPLATE.get(name, f"{name}.j2"), view, templates))


def _names(manifest: Manifest) -> Iterator[str]:
    if manifest.launch is None:
        return
    yield from ("ENVIRONMENT.md", "start_vllm.sh", "stop_vllm.sh", "verify.sh")
    if manifest.base.image:
        yield from (".dockerignore", "Dockerfile", "docker-run.sh")
    if manifest.bench is not None:
        yield "run_throughput.sh"
    if manifest.profile is not None:
        yield "profile.sh"


def _view(manifest: Manifest, base: str, user: str) -> View:
    view = View(
        name=manifest.name,
        image=f"dcu-bundle/{manifest.name}",
        base=base or manifest.base.image,
        user=user,
        python=manifest.base.python,
        env_script=manifest.base.env_script,
        scripts=tuple(name for name in sorted(_names(manifest)) if name in ON_TARGET),
    )
    if manifest.launch is not None:
        view = _launch_part(view, manifest, manifest.launch)
    if manifest.bench is not None:
        view = _bench_part(view, manifest, manifest.bench)
    if manifest.profile is not None:
        view = _profile_part(view, manifest.profile)
    return view


def _launch_part(view: View, manifest: Manifest, launch: Launch) -> View:
    argv = manifest.serve_argv()
    return dataclasses.replace(
        view,
        launch_dir=launch.dir,
        argv=argv,
        command_lines=tuple(shlex.join(argv).splitlines()),
        host=_host(argv),
        port=launch.port,
        ready=launch.ready,
        ranks=_ranks(argv),
        shm_kib=launch.container.shm_size // 1024,
        env=tuple(Named(n, value=v.value, why=v.why) for n, v in launch.env.items()),
        options=tuple(_options(launch.container)),
        devices=launch.container.devices,
        mounts=launch.container.mounts,
    )


def _options(container: Container) -> Iterator[str]:
    """The options of `docker run` that hold on every host, one word each."""
    yield f"--network={container.network}"
    yield f"--ipc={container.ipc}"
    yield f"--shm-size={container.shm_size}"
    yield from (f"--group-add={group}" for group in container.groups)
    yield from (f"--cap-add={capability}" for capability in container.capabilities)
    yield from (f"--security-opt={option}" for option in container.security)
    yield from (f"--ulimit={name}={limit}" for name, limit in sorted(container.ulimits.items()))


def _ranks(argv: tuple[str, ...]) -> int:
    """How many processes share memory: what the tensor-parallel flag says."""
    value = _value(argv, "--tensor-parallel-size", "-tp")
    return int(value) if value.isdecimal() else 1


def _host(argv: tuple[str, ...]) -> str:
    """Where a client on the same machine reaches the server."""
    asked = _value(argv, "--host")
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "localhost"}.get(asked, asked)  # noqa: S104


def _value(argv: tuple[str, ...], *flags: str) -> str:
    """Return what a flag says, in either spelling; "" where it is not there."""
    for index, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag in flags:
            return value if equals else "".join(argv[index + 1 : index + 2])
    return ""


def _bench_part(view: View, manifest: Manifest, bench: Bench) -> View:
    if manifest.model is None:
        raise BadValues(
            f"cannot render run_throughput.sh of {manifest.name}",
            why="its manifest has `bench:` and no `model:`, so nobody knows what to ask for",
            fix=f"add `model:` to manifests/{manifest.name}.yaml",
        )
    model = manifest.model
    served = ("--model", model.served_name, "--tokenizer", model.path)
    where = ("--host", view.host or "127.0.0.1", "--port", str(view.port))
    return dataclasses.replace(
        view,
        buckets=tuple(
            Named(name, dataset=b.dataset, sha256=b.sha256, requests=b.requests)
            for name, b in bench.buckets.items()
        ),
        bench_argv=("vllm", "bench", "serve", *where, *served, *bench.flags),
        script=bench.script,
    )


def _profile_part(view: View, profile: Profile) -> View:
    return dataclasses.replace(view, tool=profile.tool, library_path=profile.library_path)


def _check_recipe(view: View) -> None:
    """Refuse what a Dockerfile cannot say: it has no quoting that every builder knows."""
    said = {
        "base.image": view.base,
        "the base image's user": view.user,
        "launch.dir": view.launch_dir,
    }
    for field, text in said.items():
        if any(c.isspace() or c in "\"'\\$`#[]," for c in text):
            raise BadValues(
                f"{field} cannot be said in a Dockerfile",
                why=f"{text!r} holds a blank or a quote",
                fix="name a folder or image without them",
            )
