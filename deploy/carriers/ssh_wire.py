"""What goes over a line to a target: the command that finds a Python, the agent, frames and blobs.

The target's half of the protocol, and its description, is `deploy.agent.stream`. Pure: no socket.
"""

from __future__ import annotations

import base64
import json
import shlex
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from deploy.errors import BadValues, Unfit

# In the order of trial, after the service's own interpreter.
PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python3.10")
# What may come before the magic: banners, /etc/motd, a talkative start-up file.
_NOISE = 1 << 20
_FRAME = 64 << 20
_PIECE = 1 << 18
SENT_ALONE = 1 << 16  # bytes; smaller frames wait for the next ones
_PACKED = 1 << 31  # the flag of a packed frame, in its length

# The loader's syntax is that of Python 2.7 too, and it ends with 93 before it reads anything on a
# Python that is too old. 2 is an option that the interpreter does not know (Python 2 and -I), 126
# and 127 are a name that cannot be run. The script is free of what login shells treat differently
# within single quotes: the quote itself, backslash, exclamation mark and line break.
_LOADER = (
    "import sys,zlib,binascii;sys.version_info<(3,10) and sys.exit(93);"
    "exec(zlib.decompress({source}))"
)
_ON_STDIN = "sys.stdin.buffer.read({size})"
_IN_ARGUMENT = "binascii.a2b_base64(sys.argv[1])"
# A program up to this size goes along in the command, which saves a round trip: a server lets no
# byte of stdin be sent before it has started the command.
_ARGUMENT = 12 << 10
_SCRIPT = (
    'for p do "$p" -I -S -X utf8 -c "{loader}" "$0"; r=$?; '
    "case $r in 2|93|126|127) ;; *) exit $r ;; esac; done; "
    'echo "{nonce}none"; for p do '
    'command -v "$p" >/dev/null 2>&1 || {{ echo "$p not found"; continue; }}; '
    'echo "$p is $("$p" -V 2>&1 </dev/null | head -n 1)"; done; exit 3'
)
# The first program: it gets the parts of the job, then modules live in memory under their names of
# a bundle, so that relative imports are the same. It speaks the protocol of `deploy.agent.stream`.
_BOOT = """\
import hashlib, json, marshal, os, struct, sys, zlib
from importlib import import_module
from importlib.machinery import ModuleSpec

def stored(sha):
    path = os.path.join(os.path.expanduser(job["state_dir"]), "blobs", sha)
    try:
        with open(path, "rb") as file:
            return file.read() if job["state_dir"] else b""
    except OSError:
        return b""

def read(size):
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        sys.exit(5)
    return data

def received():
    data = b""
    while size := struct.unpack(">I", read(4))[0]:
        body = read(size & 0x7fffffff)
        data += zlib.decompress(body) if size >> 31 else body
    return data

def right(sha, data):
    return hashlib.sha256(data).hexdigest() == sha

class Memory:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "agent" or name.startswith("agent.") and name[6:] in sources:
            return ModuleSpec(name, cls, origin="memory", is_package=name == "agent")
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def get_source(name):
        return sources[name[6:] or "__init__"]
    @staticmethod
    def get_data(path):
        stem = os.path.basename(path)[:-3]
        if stem not in sources:
            raise OSError(2, "not in memory", path)
        return sources[stem].encode()
    @classmethod
    def exec_module(cls, module):
        stem = module.__name__[6:] or "__init__"
        module.__file__ = "<memory>/agent/" + stem + ".py"
        if stem not in codes:
            codes[stem] = compile(sources[stem], module.__file__, "exec", 0, True)
        exec(codes[stem], module.__dict__)

job = json.loads(PAYLOAD)
parts = job.pop("parts")
os.write(1, (job["nonce"] + "\\n").encode())
for sha in job["needs"]:
    if sha not in parts and right(sha, found := stored(sha)):
        parts[sha] = found.decode()
missing = [sha for sha in job["needs"] if sha not in parts]
if missing:
    body = json.dumps(missing).encode()
    os.write(1, b"N" + struct.pack(">I", len(body)) + body)
    for sha in missing:
        data = received()
        if not right(sha, data):
            sys.exit(4)
        parts[sha] = data.decode()
sources = json.loads(parts[job["agent"]])
sys.meta_path.insert(0, Memory)
# What an earlier call of just this interpreter compiled, by a digest that it told the operator.
key = "%s-%x-%s" % (sys.implementation.cache_tag, sys.hexversion, job["agent"])
sha = job["codes"].get(key, "")
found = stored(sha) if sha else b""
codes = marshal.loads(found) if found and right(sha, found) else {}
# All at once, before the process that verifies is forked off, so that nothing is compiled twice. A
# module that cannot be loaded shows when it is used.
for name in sorted(sources):
    try:
        import_module("agent." + name)
    except ImportError:
        pass
sys.exit(sys.modules["agent.stream"].serve(job, parts, codes))
"""


def command(
    pythons: Sequence[str], program: bytes, nonce: str, *, sudo: bool = False
) -> tuple[str, bytes]:
    """Return a shell line that runs a packed program on the first fit Python, and its stdin.

    Raises:
        BadValues: an interpreter's path that no shell of every kind takes as it is.
    """
    for name in pythons:
        if not name or not name.isprintable() or set(name) & set("'\\!"):
            raise BadValues(
                f"cannot start {name!r} over ssh",
                why="its path holds a quote, backslash, exclamation mark or control character",
                fix="give another path to this interpreter in hosts.yaml (python:)",
            )
    argument, stdin, source = "sh", program, _ON_STDIN.format(size=len(program))
    if len(program) <= _ARGUMENT:
        argument, stdin, source = base64.b64encode(program).decode(), b"", _IN_ARGUMENT
    script = _SCRIPT.format(loader=_LOADER.format(source=source), nonce=nonce)
    argv = ("sh", "-c", script, argument, *dict.fromkeys(pythons))
    return "exec " + shlex.join((*(("sudo", "-n") if sudo else ()), *argv)), stdin


def job(values: Mapping[str, Any], parts: Mapping[str, str]) -> bytes:
    """Return the packed first program: the job's values, and those parts that go along with it."""
    payload = json.dumps({**values, "parts": parts}, sort_keys=True)
    return zlib.compress(f"PAYLOAD = {payload!r}\n{_BOOT}".encode(), 9)


class Frames:
    """Takes bytes as they come, gives whole frames; skips whatever is said before the magic."""

    def __init__(self, nonce: str) -> None:
        self._magic = nonce.encode()
        self._buffer = bytearray()
        self.open = False
        self.noise = b""

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield (kind, body) of the frames that `data` completes.

        Raises:
            Unfit: no Python of the target is fit; what was found is named.
            ValueError: this is not our agent that speaks.
        """
        self._buffer += data
        if not self.open and not self._skip_noise():
            return
        while len(self._buffer) >= 5:
            size = struct.unpack(">I", self._buffer[1:5])[0]
            if size > _FRAME:
                raise ValueError(f"a frame of {size} bytes was announced")
            if len(self._buffer) < 5 + size:
                return
            kind, body = chr(self._buffer[0]), bytes(self._buffer[5 : 5 + size])
            del self._buffer[: 5 + size]
            yield kind, body

    def no_python(self) -> list[str] | None:
        """After the end: the interpreters that were found unfit, or None when one was fit."""
        head, found, tail = bytes(self._buffer).partition(self._magic + b"none\n")
        if self.open or not found:
            return None
        self.noise = head
        return tail.decode("utf-8", "replace").splitlines()

    def _skip_noise(self) -> bool:
        magic = self._magic + b"\n"
        at = self._buffer.find(magic)
        if at < 0:
            if len(self._buffer) > _NOISE:
                raise ValueError(f"more than {_NOISE} bytes came before the agent said a word")
            self.noise = bytes(self._buffer)
            return False
        self.noise = bytes(self._buffer[:at])
        del self._buffer[: at + len(magic)]
        self.open = True
        return True


class Packer:
    """Cuts contents into frames, and packs (zlib) those where that saves time on this line.

    On a slow line packing pays; on a fast one it costs more than it saves. Which it is shows by how
    long the frames take: time passes here while a frame that was yielded is being sent.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._line = 0.0  # seconds a byte takes to be sent, smoothed
        self._work = 0.0  # seconds a byte takes to be packed

    def frames(self, stream: IO[bytes]) -> Iterator[bytes]:
        """Yield one content as it goes over the line."""
        left = 0.0  # what packing leaves of this content, as a share; 0: not tried yet
        while piece := stream.read(_PIECE):
            body, flag = piece, 0
            if not left or self._pays(left):
                began = self._clock()
                body, flag = zlib.compress(piece, 1), _PACKED
                self._work = (self._clock() - began) / len(piece)
                left = len(body) / len(piece)
            if len(body) >= len(piece):
                body, flag = piece, 0
            began = self._clock()
            yield struct.pack(">I", flag | len(body)) + body
            if len(body) >= SENT_ALONE:
                took = (self._clock() - began) / len(body)
                self._line = took if not self._line else 0.7 * self._line + 0.3 * took
        yield struct.pack(">I", 0)

    def _pays(self, left: float) -> bool:
        return self._work + left * self._line < self._line


def unfit(name: str, found: Sequence[str]) -> Unfit:
    return Unfit(
        f"{name} has no Python that can run the agent",
        why="it needs Python >= 3.10; found " + ("; ".join(found) or "nothing"),
        fix="name one in hosts.yaml (python:), or install python3.10 or newer on the target",
    )
