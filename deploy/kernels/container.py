"""Run the commands of a build in a container of the target's own image.

The build folder lies on this machine's local disk and is mounted at the same path, so everything
but the commands themselves happens here: laying the source, reading logs, proving the binary.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.agent.machine import boot_id, start_of
from deploy.errors import BadValues, Unreachable

from .request import BuildRequest
from .runner import Env, Local, Runner, failed

if TYPE_CHECKING:
    from docker import DockerClient

KIND = "container:"
SOCKET = "unix:///var/run/docker.sock"
# Marks a container of one call, as the carriers do: `./inv gc` removes those of dead processes.
TEMPORARY = "dcu-bundle.temporary"
_LATE = (124, 137)  # what `timeout` ends with


@contextlib.contextmanager
def runner(where: str, request: BuildRequest) -> Iterator[Runner]:
    """Give the runner that `where` names: "local", or "container:IMAGE".

    Raises:
        BadValues: it names neither. Unreachable: there is no engine, or no such image.
    """
    if where in ("", "local"):
        yield Local()
        return
    if not where.startswith(KIND) or not where[len(KIND) :]:
        raise BadValues(
            f"{where} is no place to build",
            why="a place is `local` or `container:IMAGE`",
            fix="correct --where",
        )
    folders = [request.build_dir, *([request.ccache_dir] if request.ccache_dir else [])]
    with started(where[len(KIND) :], folders) as found:
        yield found


class Container:
    """A running container in which commands are run one by one, as this user."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self.where = f"{KIND}{container.attrs['Config']['Image']}"
        self._api = container.client.api

    def hold(self, lock: int) -> None:
        """Hold nothing: what we leave in a container ends with it, and `./inv gc` removes it."""

    def run(self, argv: tuple[str, ...], *, env: Env, cwd: Path, log: Path, seconds: int) -> int:
        with log.open("ab") as out:
            code = self._exec(argv, env, cwd, seconds, out.write)
        if code in _LATE:
            raise BadValues(
                f"{Path(argv[0]).name} did not end within {seconds} s in the container",
                why=f"its output so far is in {log}",
                fix="look there for the command that hangs",
            )
        return code

    def ask(self, argv: tuple[str, ...], *, env: Env, cwd: Path, seconds: int = 120) -> str:
        pieces: list[bytes] = []
        code = self._exec(argv, env, cwd, seconds, pieces.append)
        said = b"".join(pieces).decode("utf-8", "replace")
        if code != 0:
            raise failed(argv, said)
        return said

    def _exec(self, argv: tuple[str, ...], env: Env, cwd: Path, seconds: int, take: Any) -> int:
        from docker.utils.socket import frames_iter

        # The image's user database does not know us; a home is where anybody may write.
        late = ("timeout", "-k", "10", str(seconds), *argv)
        made = self._api.exec_create(
            self._container.id,
            late,
            environment={**env, "HOME": "/tmp"},  # noqa: S108
            workdir=str(cwd),
            user=f"{os.geteuid()}:{os.getegid()}",
        )
        # The SDK's own stream never closes its connection.
        with contextlib.closing(self._api.exec_start(made["Id"], socket=True)) as line:
            for _, piece in frames_iter(line, tty=False):  # type: ignore[no-untyped-call]
                take(piece)
            line._response.close()  # noqa: SLF001  closing the stream alone keeps the connection
        code = self._api.exec_inspect(made["Id"])["ExitCode"]
        if code is None:
            raise Unreachable(
                f"{argv[0]} has no exit code",
                why="the container stopped while it ran",
                fix="look into `docker events`, and build again",
            )
        return int(code)


@contextlib.contextmanager
def started(image: str, folders: list[Path]) -> Iterator[Container]:
    """Start a container of `image` with these folders mounted; remove it at the end."""
    with _there(folders), contextlib.closing(_client()) as client:
        made = _created(client, image, folders)
        try:
            made.start()
            yield Container(made)
        finally:
            made.remove(force=True)


@contextlib.contextmanager
def _there(folders: list[Path]) -> Iterator[None]:
    """Make folders, which a mount needs; take away at the end what was made and is still empty."""
    made: dict[Path, None] = {}
    for folder in folders:
        made |= {path: None for path in (folder, *folder.parents) if not path.exists()}
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in sorted(made, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                path.rmdir()


def _client() -> DockerClient:
    from docker.errors import DockerException

    from docker import DockerClient

    where = os.environ.get("DOCKER_HOST", SOCKET)
    try:
        _knock(where)
        # Reading a build's output may have nothing to read for as long as the build takes.
        return DockerClient(where, timeout=6 * 3600)
    except (DockerException, OSError) as err:
        raise _no_engine(err) from err


def _knock(where: str) -> None:
    """Raise OSError when nobody listens at a socket: the SDK would leave its own one open."""
    kind, _, path = where.partition("://")
    if kind == "unix":
        with socket.socket(socket.AF_UNIX) as knock:
            knock.connect(path)


def _created(client: DockerClient, image: str, folders: list[Path]) -> Any:
    from docker.errors import DockerException, ImageNotFound

    try:
        return client.containers.create(
            image,
            entrypoint=["sleep"],
            command=["infinity"],
            init=True,
            network_disabled=True,
            labels={TEMPORARY: json.dumps([boot_id(), os.getpid(), start_of(os.getpid())])},
            volumes={str(f): {"bind": str(f), "mode": "rw"} for f in folders},
        )
    except ImageNotFound as err:
        raise Unreachable(
            f"there is no image {image}",
            why=str(err.explanation or err),
            fix="pull it first, or correct --where",
        ) from err
    except (DockerException, OSError) as err:
        raise _no_engine(err) from err


def _no_engine(err: Exception) -> Unreachable:
    return Unreachable(
        "there is no Docker engine", why=str(err), fix="start one, or build with --where local"
    )
