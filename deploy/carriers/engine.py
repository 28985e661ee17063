"""The container engine behind a small face: look into an image, run one child, load, remove.

The only module that talks to the engine's SDK. Every container that it makes has a name and a
label of ours and is gone when the call ends, however it ends; time-outs are long, because a client
that gives up does not stop the engine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import socket
import tarfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar, cast

from deploy.errors import BadValues, Refused, Unfit, Unreachable
from deploy.image.base import Seen

if TYPE_CHECKING:
    import docker

SOCKET = "unix:///var/run/docker.sock"
# Marks a container of one call; the value says whose, so that `gc` can leave living ones alone.
TEMPORARY = "dcu-bundle.temporary"
NAME = "dcu-bundle.name"
_OLDEST = "1.24"  # the API that the SDK still speaks
_HELLO = 20.0  # seconds until an engine that does not answer counts as absent
_PATIENCE = 3600.0  # seconds of silence: a big load is one request
_SLICE = 1 << 18
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

Progress = Callable[[int, int], None]  # bytes so far, bytes in all (0: not known)


class Store(str, Enum):
    """Where an engine keeps images; it decides what an image's id is the digest of."""

    CLASSIC = "classic"  # the id is the config's digest
    CONTAINERD = "containerd"  # the id is the manifest's digest


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child in a container ended; `code` is None when the engine would not say."""

    code: int | None
    out: bytes
    err: bytes


class Engine:
    """One engine, spoken to through its socket."""

    def __init__(self, client: docker.APIClient) -> None:
        self._client = client

    @functools.cached_property
    def store(self) -> Store:
        """The kind of this engine's store; asked for once, since the answer takes a while."""
        status = self._client.info().get("DriverStatus") or ()
        snapshotter = ["driver-type", "io.containerd.snapshotter.v1"]
        return Store.CONTAINERD if snapshotter in [list(row) for row in status] else Store.CLASSIC

    def inspect(self, reference: str) -> dict[str, Any] | None:
        """What the engine says of an image, or None when it has no such image.

        Raises:
            BadValues: no image can have that name.
        """
        import docker.errors

        try:
            answer = self._client.inspect_image(reference)  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            return None
        except docker.errors.APIError as err:
            if err.status_code != HTTPStatus.BAD_REQUEST:
                raise
            raise BadValues(
                f"{reference} is no name of an image",
                why=str(err.explanation),
                fix="write NAME:TAG, the name in lower case: base.image in the manifest, or -t",
            ) from err
        return cast(dict[str, Any], answer)

    def inspect_container(self, container: str) -> dict[str, Any] | None:
        import docker.errors

        try:
            return cast(dict[str, Any], self._client.inspect_container(container))
        except docker.errors.NotFound:
            return None

    @contextlib.contextmanager
    def still(self, image: str) -> Iterator[Still]:
        """A container of the image that is never started, to look into it."""
        with self._temporary(image, ("-",), open_stdin=False) as container:
            yield Still(self._client, container)

    def run(
        self,
        image: str,
        argv: Iterable[str],
        stdin: Iterable[bytes] = (),
        *,
        show: IO[bytes] | None = None,
        ready: bytes = b"",
    ) -> Ended:
        """Run `argv` as root in a new container without network, and remove the container.

        What the child says on stderr goes to `show` as it comes, and into the answer.

        Raises:
            Unfit: the image cannot run `argv` at all.
        """
        import docker.errors

        words = tuple(argv)
        with self._temporary(image, words, open_stdin=True) as container:
            ways = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            with _closing(self._client.attach_socket(container, ways)) as line:
                try:
                    self._client.start(container)
                except docker.errors.APIError as err:
                    raise _cannot_run(words, image, err) from err
                out, said = _converse(line, stdin, show, ready)
            code = self._client.wait(container).get("StatusCode")
        return Ended(code, out, said)

    def execute(
        self,
        container: str,
        argv: Iterable[str],
        stdin: Iterable[bytes] = (),
        *,
        environment: Mapping[str, str] | None = None,
        show: IO[bytes] | None = None,
        ready: bytes = b"",
        interrupted: Callable[[], None] | None = None,
    ) -> Ended:
        """Run `argv` as root in a running container. `interrupted` is called once on ^C.

        With `ready`, stdin is sent when the child has begun its stdout with these bytes.
        """
        words = list(argv)
        made = self._client.exec_create(
            container, words, stdin=True, user="0", environment=dict(environment or {})
        )
        with (
            _closing(self._client.exec_start(made["Id"], socket=True)) as line,
            # In a thread, or ^C could tear an answer that was being read.
            contextlib.closing(_Asked(lambda: _converse(line, stdin, show, ready))) as asked,
        ):
            try:
                out, said = asked.answer()
            except KeyboardInterrupt:
                if interrupted is None:
                    raise
                interrupted()
                out, said = asked.answer()
        # The stream's end does not carry the exit code; a code that stays unknown is a failure.
        return Ended(self._client.exec_inspect(made["Id"]).get("ExitCode"), out, said)

    def _state(self, done: Callable[[], bool]) -> str:
        """What the engine made of a call that we gave up on: asked, never guessed."""
        try:
            return "it has done it" if done() else "it has not done it so far"
        except OSError:
            return "it does not answer at all"

    def load(
        self,
        data: Iterable[bytes],
        size: int,
        progress: Progress | None = None,
        *,
        reference: str = "",
    ) -> None:
        """Load an image archive of `size` bytes, which brings an image called `reference`.

        Raises:
            Refused: the engine would not take it; nothing of it is left.
            Unreachable: the client gave up while the engine may still be working.
        """
        import docker.errors

        cut = threading.Event()
        sent = _counted(data, size, progress, cut)
        last = ""
        try:
            last = _whole(lambda: self._load(sent), cut)
        except docker.errors.APIError as err:
            last = str(err.explanation or err)
        except OSError as err:  # requests' errors are OSErrors; ^C is none
            state = self._state(lambda: bool(reference) and self.inspect(reference) is not None)
            raise _gave_up(f"load {reference or 'an image'}", err, state) from err
        if last:
            raise _load_error(last)

    def _load(self, sent: Iterator[bytes]) -> str:
        """Send an archive; return the last error that the engine speaks of, if any."""
        last = ""
        for answer in self._client.load_image(sent):  # type: ignore[no-untyped-call]
            last = answer.get("error") or last
        return last

    def build(self, context: IO[bytes], reference: str, tell: Callable[[str], None]) -> str:
        """Build a context, given as a tar, with the classic builder; return the image's id.

        Every step's container is removed, also after a failure, and no step has a network.

        Raises:
            Refused: a step failed; nothing is tagged.
        """
        import docker.errors

        last: list[str] = []
        try:
            for line in self._client.build(
                fileobj=context,
                custom_context=True,
                tag=reference,
                rm=True,
                forcerm=True,
                nocache=True,
                network_mode="none",
                decode=True,
            ):
                if "error" in line:
                    raise _failed_step(" ".join(_plain(str(line["error"]))), last)
                for text in _plain(str(line.get("stream", ""))):
                    last.append(text)
                    tell(text)
        except docker.errors.APIError as err:
            raise _failed_step(str(err.explanation or err), last) from err
        except OSError as err:
            raise _gave_up(f"build {reference}", err) from err
        return str((self.inspect(reference) or {})["Id"])

    def save(self, image: str) -> Iterator[bytes]:
        """The image as a `docker save` tar, in slices; its bytes are not the same twice."""
        return cast(Iterator[bytes], self._client.get_image(image))

    @contextlib.contextmanager
    def saving(self, image: str, progress: Progress | None = None) -> Iterator[IO[bytes]]:
        """The same as a stream that may be left before its end."""
        path = f"/images/{image}/get"
        with _answer(self._client, path, {}, f"save {image}") as stream:
            assert stream is not None
            yield cast(IO[bytes], _Counting(stream, progress)) if progress else stream

    def pull(self, reference: str, progress: Progress | None = None) -> None:
        """Pull an image, by digest where the reference has one.

        Raises:
            Unreachable: the registry did not answer, or has no such image.
        """
        import docker.errors

        done: dict[str, int] = {}
        sizes: dict[str, int] = {}
        try:
            for line in self._client.pull(reference, stream=True, decode=True):
                if "error" in line:
                    raise _no_pull(reference, str(line["error"]))
                if line.get("status") in ("Downloading", "Download complete"):
                    detail, layer = line.get("progressDetail") or {}, str(line.get("id"))
                    sizes[layer] = detail.get("total") or sizes.get(layer, 0)
                    done[layer] = detail.get("current") or sizes[layer]
                    if progress is not None:
                        progress(sum(done.values()), sum(sizes.values()))
        except docker.errors.APIError as err:
            raise _no_pull(reference, str(err.explanation or err)) from err
        except OSError as err:
            raise _gave_up(f"pull {reference}", err) from err

    def tag(self, image: str, name: str, tag: str) -> None:
        self._client.tag(image, name, tag)

    def remove_image(self, reference: str) -> str:
        """Remove an image or a tag; return "" or why the engine keeps it."""
        import docker.errors

        try:
            self._client.remove_image(reference)
        except docker.errors.APIError as err:
            return str(err.explanation or err)
        return ""

    def images(self, label: str) -> list[dict[str, Any]]:
        """Images that carry a label, given as NAME or NAME=VALUE."""
        return cast(list[dict[str, Any]], self._client.images(filters={"label": label}))

    def left_over(self) -> list[dict[str, Any]]:
        """Containers of calls that ended without removing them, and of no living call."""
        found = self._client.containers(all=True, filters={"label": TEMPORARY})
        return [one for one in found if not _lives(one["Labels"].get(TEMPORARY, ""))]

    def used_images(self, but: Collection[str] = ()) -> set[str]:
        """The ids of the images of all containers, running or not, other than these."""
        found = self._client.containers(all=True)
        return {one["ImageID"] for one in found if one["Id"] not in but}

    def remove_container(self, container: str) -> None:
        import docker.errors

        with contextlib.suppress(docker.errors.NotFound):
            self._client.remove_container(container, force=True, v=True)

    @contextlib.contextmanager
    def _temporary(self, image: str, argv: tuple[str, ...], *, open_stdin: bool) -> Iterator[str]:
        # The name is ours and known before the call: a create that times out may still happen, and
        # is then found and removed by it.
        name = f"dcu-bundle-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self._create(name, image, argv, open_stdin=open_stdin)
            yield name
        finally:
            # An engine that hangs must not hide the error before it; `gc` finds what stays.
            with contextlib.suppress(OSError):
                self.remove_container(name)

    def _create(self, name: str, image: str, argv: tuple[str, ...], *, open_stdin: bool) -> None:
        import docker.errors

        client = self._client
        try:
            _whole(
                lambda: client.create_container(
                    image,
                    command=list(argv[1:]),
                    entrypoint=list(argv[:1]),
                    name=name,
                    user="0",
                    stdin_open=open_stdin,
                    labels={TEMPORARY: _me()},
                    network_disabled=True,
                    host_config=client.create_host_config(network_mode="none"),
                )
            )
        except docker.errors.ImageNotFound as err:
            raise _no_image(image) from err
        except docker.errors.APIError as err:
            raise Refused(
                f"the engine makes no container of {image}",
                why=str(err.explanation or err),
                fix="mend what the engine names, then run this again",
            ) from err
        except OSError as err:
            state = self._state(lambda: self.inspect_container(name) is not None)
            raise _gave_up(f"make a container of {image}", err, state) from err


class Still:
    """A container that does not run: its files, read through the engine, need no program in it."""

    def __init__(self, client: docker.APIClient, container: str) -> None:
        self._client = client
        self._container = container

    def look(self, path: str) -> Seen:
        """What stands at an absolute path; the last part is not followed when it is a link."""
        with self._archive(path) as stream:
            if stream is None:
                return Seen()
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                member = tar.next()
                return Seen() if member is None else _seen(tar, member)

    def names(self, folder: str) -> tuple[str, ...]:
        """The names directly in a folder, sorted; none when it is no folder."""
        with self._archive(folder) as stream:
            if stream is None:
                return ()
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                parts = [member.name.rstrip("/").split("/") for member in tar]
        return tuple(sorted({part[1] for part in parts if len(part) == 2}))

    def other(self, folder: str, known: Collection[str]) -> str:
        """One name in a folder that is not among `known`, or ""; reads no further than to it."""
        with self._archive(folder) as stream:
            if stream is None:
                return ""
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                parts = (member.name.rstrip("/").split("/") for member in tar)
                return next((p[1] for p in parts if len(p) > 1 and p[1] not in known), "")

    def _archive(self, path: str) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        place = f"/containers/{self._container}/archive"
        return _answer(self._client, place, {"path": path}, f"read {path} in the image")


@contextlib.contextmanager
def _answer(
    client: docker.APIClient, path: str, params: Mapping[str, str], what: str
) -> Iterator[IO[bytes] | None]:
    """A big answer of the engine as a stream, None where it knows no such thing.

    Leaving early closes it: a tar of a whole folder, for instance, after the first header.
    """
    url = f"{client.base_url}/v{client.api_version}{path}"
    plain = {"Accept-Encoding": "identity"}  # or the engine deflates the tar
    with client.get(url, params=dict(params), stream=True, headers=plain) as answer:
        if answer.status_code == 404:
            yield None
        elif answer.status_code != 200:
            raise Unreachable(
                f"cannot {what}",
                why=f"the engine answered {answer.status_code}: {answer.text[:300]}",
                fix="see the engine's log",
            )
        else:
            yield cast(IO[bytes], answer.raw)


class _Counting:
    """A stream that says how much of it was read; how long it is nobody knows."""

    def __init__(self, stream: IO[bytes], progress: Progress) -> None:
        self._stream, self._progress, self._done = stream, progress, 0

    def read(self, size: int) -> bytes:
        piece = self._stream.read(size)
        self._done += len(piece)
        self._progress(self._done, 0)
        return piece


@contextlib.contextmanager
def open_engine(url: str = "", *, patience: float = _PATIENCE) -> Iterator[Engine]:
    """The engine at `url`, at DOCKER_HOST, or at this machine's socket.

    Raises:
        Unreachable: none answers there, or it is too old for the SDK.
    """
    import docker.errors
    import docker.utils

    import docker

    where = url or os.environ.get("DOCKER_HOST") or SOCKET
    try:
        options: dict[str, Any] = {**docker.utils.kwargs_from_env(), "base_url": where}
        _knock(where)
        version = _api_version(options)
        client = docker.APIClient(version=version, timeout=cast(Any, patience), **options)
    except docker.errors.InvalidVersion as err:
        raise Unreachable(
            f"the container engine at {where} is too old",
            why=str(err),
            fix="update it: 20.10 and newer are known to work",
        ) from err
    # ValueError: an address that is none, or an answer that no engine gives.
    except (docker.errors.DockerException, OSError, ValueError) as err:
        raise Unreachable(
            f"no container engine answers at {where}",
            why=_innermost(err),
            fix="start it (`systemctl start docker`), join its group, or set DOCKER_HOST",
        ) from err
    with contextlib.closing(client):
        yield Engine(client)


def _knock(where: str) -> None:
    """Raise OSError when nobody listens at a socket: the SDK would hide why, and leak one.

    Raises ValueError for a pipe of Windows, which the SDK does not refuse but trips over.
    """
    kind, _, path = where.partition("://")
    if kind == "npipe":
        raise ValueError("a named pipe is there on Windows only")
    if kind in ("unix", "http+unix"):
        with socket.socket(socket.AF_UNIX) as knock:
            knock.settimeout(_HELLO)
            knock.connect("/" + path.lstrip("/"))


def _api_version(options: Mapping[str, Any]) -> str:
    """Ask an engine, with little patience, for the newest API that it speaks."""
    import docker

    hello = docker.APIClient(version=_OLDEST, timeout=cast(Any, _HELLO), **options)
    with contextlib.closing(hello):
        return str(hello.version(api_version=False)["ApiVersion"])


def _seen(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Seen:
    found = Seen(kind="other", mode=member.mode & 0o7777, uid=member.uid, gid=member.gid)
    if member.isdir():
        return replace(found, kind="folder")
    if member.issym():
        return replace(found, kind="link", link=member.linkname)
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        return found
    digest = hashlib.sha256()
    while piece := content.read(_SLICE):
        digest.update(piece)
    return replace(found, kind="file", size=member.size, sha256=digest.hexdigest())


@contextlib.contextmanager
def _closing(stream: Any) -> Iterator[Any]:
    """Close all three parts of the SDK's stream; its own `close` leaves the socket open."""
    below = stream._sock  # noqa: SLF001 - the SDK gives no other way
    try:
        yield stream
    finally:
        if response := getattr(stream, "_response", None):
            response.close()
        stream.close()
        below.close()


def _converse(
    line: Any, stdin: Iterable[bytes], show: IO[bytes] | None, ready: bytes = b""
) -> tuple[bytes, bytes]:
    """Send stdin, then read both of the child's streams to their end.

    With `ready` nothing is sent before the child has said so on stdout: some engines keep a line
    open for minutes when the child could not be started, and never read what was sent.
    """
    from docker.utils.socket import frames_iter

    parts: dict[int, list[bytes]] = {1: [], 2: []}
    frames = frames_iter(line, tty=False)  # type: ignore[no-untyped-call]
    if not ready:
        _send(line, stdin)
    # An engine that could not start the child resets the line; the exit code then says so.
    with contextlib.suppress(ConnectionResetError):
        for number, data in frames:
            if ready and number == 1 and data.startswith(ready):
                _send(line, stdin)
                data, ready = data[len(ready) :], b""  # noqa: PLW2901 - the rest is the child's
            parts.setdefault(number, []).append(data)
            if show is not None and number == 2:
                show.write(data)
                show.flush()
    return b"".join(parts[1]), b"".join(parts[2])


def _send(line: Any, stdin: Iterable[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended before; it says why
        for piece in stdin:
            line._sock.sendall(piece)  # noqa: SLF001 - the SDK gives no other way to write


_Said = TypeVar("_Said")


def _whole(ask: Callable[[], _Said], cut: threading.Event | None = None) -> _Said:
    """The engine's answer to a call that makes something, waited for after ^C as well.

    The engine goes on when its caller is gone: what it makes would come after we have cleaned up.
    `cut` is set on ^C, for a call that can still stop sending. A second ^C does not wait.
    """
    with contextlib.closing(_Asked(ask)) as asked:
        try:
            return asked.answer()
        except KeyboardInterrupt:
            if cut is not None:
                cut.set()
            asked.over.wait()
            raise


class _Asked(Generic[_Said]):
    """A call in a thread of its own, which a signal does not reach."""

    def __init__(self, ask: Callable[[], _Said]) -> None:
        self.over = threading.Event()
        self._ask = ask
        self._said: list[_Said] = []
        self._failed: BaseException | None = None
        # A daemon: after a second ^C nobody waits for an engine that hangs.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._said.append(self._ask())
        except BaseException as err:  # noqa: BLE001 - raised again by who asked
            self._failed = err
        finally:
            self.over.set()

    def answer(self) -> _Said:
        self.over.wait()
        if self._failed is not None:
            raise self._failed
        return self._said[0]

    def close(self) -> None:
        if self.over.is_set():
            self._thread.join()


class _Cut(OSError):
    """The caller was interrupted: what is being sent ends here."""


def _counted(
    data: Iterable[bytes], size: int, progress: Progress | None, cut: threading.Event
) -> Iterator[bytes]:
    done = 0
    for piece in data:
        if cut.is_set():
            raise _Cut("interrupted")
        yield piece
        done += len(piece)
        if progress is not None:
            progress(done, size)


def _me() -> str:
    """This process, so that no later one of the same number is taken for it."""
    return json.dumps([_boot_id(), os.getpid(), _ticks(os.getpid())])


def _lives(owner: str) -> bool:
    try:
        boot_id, pid, ticks = json.loads(owner)
    except ValueError:
        return False
    return bool(boot_id == _boot_id() and ticks == _ticks(int(pid)))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _ticks(pid: int) -> int:
    """Start time of a process (field 22 of its stat); 0 when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def _innermost(err: BaseException) -> str:
    while (below := err.__cause__ or err.__context__) is not None:
        err = below
    return f"{type(err).__name__}: {err}"


def _gave_up(what: str, err: Exception, state: str = "its state is not known") -> Unreachable:
    return Unreachable(
        f"gave up waiting for the engine to {what}",
        why=f"{type(err).__name__}: {err}; asked again, {state}",
        fix="look with `docker images` and `docker ps -a`; `./inv gc` removes what was left",
    )


def _load_error(said: str) -> Refused | Unfit:
    if "no space left" in said or "disk quota" in said.lower():
        return Refused(
            "the engine has no room for the image",
            why=said,
            fix="make room below the engine's data folder (`docker system df`), then run again",
        )
    if ("no such file or directory" in said and "blobs" in said) or "failed to resolve" in said:
        return Unfit(
            "the engine does not hold the base image that is pinned",
            why=said,
            fix="pull the base by the digest in the lock, then run this again",
        )
    return Refused(
        "the engine did not take the image",
        why=said,
        fix="see the engine's log; nothing was loaded",
    )


def _plain(text: str) -> list[str]:
    """The lines of one piece of a build's output; the builder colours what went to stderr."""
    lines = (line.strip() for line in _COLOUR.sub("", text).splitlines())
    return [line for line in lines if line]


def _failed_step(why: str, said: list[str]) -> Refused:
    return Refused(
        "the build of the Dockerfile failed",
        why=f"{why} (after: {said[-1]})" if said else why,
        fix="mend that step; nothing was tagged",
    )


def _no_pull(reference: str, why: str) -> Unreachable:
    return Unreachable(
        f"cannot pull {reference}",
        why=why,
        fix="`docker login` where the registry asks for it, or bring the image with `docker load`",
    )


def _no_image(image: str) -> Unfit:
    return Unfit(
        f"the engine has no image {image}",
        why="it was asked for that name or id and knows none",
        fix=f"`docker pull {image}` (by digest where the lock has one), or load its archive",
    )


def _cannot_run(argv: tuple[str, ...], image: str, err: Any) -> Unfit:
    return Unfit(
        f"{image} cannot run {argv[0]}",
        why=str(err.explanation or err),
        fix="name the interpreter that the image has as base.python",
    )


__all__ = [
    "NAME",
    "TEMPORARY",
    "Ended",
    "Engine",
    "Still",
    "Store",
    "open_engine",
]
