"""The carriers for a running container and for an image: the agent runs inside, from memory.

The bundle goes in over the standard input of one child and lies in a nameless file there, so that
a read-only root, a missing shell and a full disk do not matter, and nothing is left behind.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from deploy.bundle import Bundle
from deploy.carriers import Request
from deploy.carriers.engine import Ended, Engine, open_engine
from deploy.errors import BadValues, BundleError, Exit, Unfit, Unreachable
from deploy.evidence import Evidence, parse

_SLICE = 1 << 18
# Finds the children of one call again: an engine forgets a child whose caller went away.
_TOKEN = "DCU_BUNDLE_CALL"  # noqa: S105 - a name, no secret

# What the loader says before the bundle is sent.
_READY = "dcu-bundle:ready\n"

# Only syntax that Python 2.7 parses may stand here, as in the bundle's own first file.
_LOADER = """\
import os, signal, sys
# Nothing was begun before the agent takes over.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
if sys.version_info < (3, 10):
    sys.stderr.write("this bundle needs Python >= 3.10, this is %d.%d\\n" % sys.version_info[:2])
    sys.exit(3)
bundle, left = os.memfd_create("bundle", 0), int(sys.argv[1])
os.write(1, sys.argv[2].encode())
while left:
    piece = os.read(0, min(left, 1 << 20))
    if not piece:
        sys.exit("the bundle did not arrive whole")
    left -= len(piece)
    while piece:
        piece = piece[os.write(bundle, piece):]
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
# Not /proc/self: a child of the agent must find the same file.
path = "/proc/%d/fd/%d" % (os.getpid(), bundle)
os.execv(sys.executable, [sys.executable, "-I", "-S", path] + sys.argv[3:])
"""

_STOP = """\
import os, signal, sys, time
found = False
for _ in range(10):  # an engine may have been asked to start it, and not have done so
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != os.getpid():
                with open("/proc/%s/environ" % name, "rb") as file:
                    if sys.argv[1].encode() in file.read().split(b"\\0"):
                        os.kill(int(name), signal.SIGINT)
                        found = True
        except OSError:
            pass
    if found:
        break
    time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True)
class Container:
    """A target that is a running container, by id or name."""

    container: str

    @property
    def name(self) -> str:
        return f"container:{self.container}"

    def deliver(self, bundle: Bundle, request: Request) -> Evidence:
        with open_engine() as engine:
            _require_running(engine, self.container)
            argv, stdin = _call(bundle, request)
            token = secrets.token_hex(8)
            ended = engine.execute(
                self.container,
                argv,
                stdin,
                environment={_TOKEN: token},
                show=_stderr(),
                ready=_READY.encode(),
                interrupted=_stopper(engine, self.container, argv[0], token),
            )
        return _evidence(ended, self.name, argv[0])


@dataclass(frozen=True, slots=True)
class ImageTarget:
    """A target that is an image: it is looked at in a container that is gone afterwards."""

    reference: str

    @property
    def name(self) -> str:
        return f"image:{self.reference}"

    def deliver(self, bundle: Bundle, request: Request) -> Evidence:
        if request.verb.writes:
            raise BadValues(
                f"will not {request.verb.value} to {self.name}",
                why="what is changed in a container of an image is gone with the container",
                fix="make an image with `./inv build-image`, or name a running container:ID",
            )
        argv, stdin = _call(bundle, request)
        with open_engine() as engine:
            ended = engine.run(self.reference, argv, stdin, show=_stderr(), ready=_READY.encode())
        return _evidence(ended, self.name, argv[0])


def _call(bundle: Bundle, request: Request) -> tuple[tuple[str, ...], Iterator[bytes]]:
    python = request.python or bundle.plan.python
    size = bundle.path.stat().st_size
    asked = (*request.steps_only().to_argv(), "--root", "/")
    return (python, "-I", "-S", "-c", _LOADER, str(size), _READY, *asked), _pieces(bundle)


def _pieces(bundle: Bundle) -> Iterator[bytes]:
    with bundle.path.open("rb") as file:
        while piece := file.read(_SLICE):
            yield piece


def _stderr() -> IO[bytes] | None:
    return getattr(sys.stderr, "buffer", None)


def _stopper(engine: Engine, container: str, python: str, token: str) -> Callable[[], None]:
    """On ^C: tell the agent inside, which undoes or finishes, and speaks its evidence."""

    def stop() -> None:
        engine.execute(container, (python, "-I", "-S", "-c", _STOP, f"{_TOKEN}={token}"))

    return stop


def _require_running(engine: Engine, container: str) -> None:
    found: dict[str, Any] | None = engine.inspect_container(container)
    if found is None:
        raise Unreachable(
            f"there is no container {container}",
            why="the engine knows neither such a name nor such an id",
            fix="`docker ps -a` lists them; a rebuilt container has a new id",
        )
    status = found["State"]["Status"]
    if status != "running":
        raise Unreachable(
            f"the container {container} does not run",
            why=f"its state is {status}",
            fix=f"`docker start {container}`, or `docker unpause {container}`",
        )


def _evidence(ended: Ended, target: str, python: str) -> Evidence:
    """The agent's answer. Raises when there is none: an unknown exit code is a failure, too."""
    if ended.out.lstrip().startswith(b"{"):
        return parse(ended.out)
    said = (ended.err + ended.out).decode("utf-8", "replace").strip()
    last = said.splitlines()[-1] if said else "it said nothing"
    if ended.code in (3, 126, 127):
        raise Unfit(
            f"{target} cannot run the agent with {python}",
            why=last,
            fix="set base.python in the manifest to a Python >= 3.10 of that container",
        )
    if ended.code == Exit.INTERRUPTED:
        raise BundleError(
            f"stopped before the agent began on {target}",
            why="it was ended by SIGINT",
            fix="nothing was changed; run it again",
            exit=Exit.INTERRUPTED,
        )
    code = "an exit code that the engine does not know" if ended.code is None else ended.code
    raise BundleError(
        f"the agent gave no evidence on {target}",
        why=f"it ended with {code}: {last}",
        fix="run `./inv verify` to see what state it left",
        exit=Exit.NEEDS_PERSON,
    )


def parse_container(text: str) -> Container:
    """Return the carrier of ``container:ID``."""
    return Container(text)


def parse_image(text: str) -> ImageTarget:
    """Return the carrier of ``image:REF``."""
    return ImageTarget(text)
