"""The agent at the far end of a line: job and contents come in on stdin, frames go out on stdout.

It runs from memory; nothing of it is written to the target. `serve` is the face. What is lost is
noticed here: when the line goes, this process gets a SIGHUP, which aborts a deploy before its
commit point and lets it finish after it.

Outgoing frames: one letter, four bytes of length (big endian), the body.
    A  alive          L  a line of progress      N  the contents we need (JSON list of sha256)
    E  the answer, once      X  a traceback: our bug
Incoming, after the job: each needed content in the order of the list, as frames of four bytes of
length and a body; a length of 0 ends it, and the highest bit says that this body is packed (zlib).

The first needed contents may be parts of the job itself (this program, the plan): the loader asks
for those that neither came along nor lie in the store.
"""

from __future__ import annotations

import hashlib
import io
import json
import marshal
import os
import select
import signal
import struct
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from .blobs import Begin, MemoryBlobs
from .judge import judge
from .main import run
from .plan import Plan
from .receipt import read_receipt
from .store import Aside, Store
from .tree import TreeReader
from .words import BundleError, Exit, Interrupted, Refused, Verb

BEAT = 3.0  # seconds between signs of life
SILENCE = 30.0  # seconds without a byte of an expected content until the line is given up
_MOST = 1 << 20  # bytes of one incoming frame, packed or not
_PACKED = 1 << 31
_Path = tuple[str, str]  # a path of the plan, and the sha256 of its content


class Line:
    """Our side of the line: frames out from any thread, contents in on the main one."""

    def __init__(self, source: int = 0, sink: int = 1) -> None:
        self._source, self._sink = source, sink
        self._lock = threading.Lock()
        self._done = threading.Event()

    def say(self, kind: bytes, body: bytes = b"") -> None:
        """Send one frame. That the line is gone is no error here: `watch` notices it."""
        view = memoryview(kind + struct.pack(">I", len(body)) + body)
        with self._lock:
            try:
                while view:
                    view = view[os.write(self._sink, view) :]
            except OSError:
                pass

    def write(self, text: str) -> int:
        """Be a text stream for the agent's lines of progress."""
        for line in filter(None, text.splitlines()):
            self.say(b"L", line.encode("utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Nothing waits here: a frame goes out when it is made."""

    def take(self, size: int) -> bytes:
        """Return exactly `size` bytes. Raises Interrupted when the line is gone or silent."""
        parts, left = [], size
        while left:
            if not select.select([self._source], [], [], SILENCE)[0]:
                raise _lost(f"not a byte came for {SILENCE:g} s")
            piece = os.read(self._source, left)
            if not piece:
                raise _lost("it ended while contents were expected")
            parts.append(piece)
            left -= len(piece)
        return b"".join(parts)

    def watch(self) -> None:
        """Start the signs of life, and the look-out for the end of the line."""
        for work in (self._beat, self._look_out):
            threading.Thread(target=work, daemon=True).start()

    def done(self) -> None:
        """From here on the end of the line is expected."""
        self._done.set()

    def _beat(self) -> None:
        while not self._done.wait(BEAT):
            self.say(b"A")

    def _look_out(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLRDHUP)
        poll.poll()
        if not self._done.is_set():
            os.kill(os.getpid(), signal.SIGHUP)


class StreamBlobs:
    """Contents from the store where it has them, and over the line where not.

    `prepare` asks for all that are missing at once, so they cost one round trip. They come in that
    order, and each is set aside, for it is read more than once: in the store, or where that cannot
    be written in a file without a name.
    """

    def __init__(self, line: Line, store: Store) -> None:
        self._line, self._store = line, store
        self._stored: set[str] = set()
        self._coming: list[str] = []
        self._aside: dict[str, Aside] = {}
        self.received = 0  # bytes of contents, unpacked

    def has(self, sha256: str) -> bool:
        """True when it is at hand; every other content of the plan can be asked for."""
        return sha256 in self._stored or (sha256 in self._aside and sha256 not in self._coming)

    def fetch(self, tree: TreeReader, plan: Plan, begin: Begin) -> None:
        """Set aside what the deploy will ask for, the modules first: they compile meanwhile.

        Whatever is wrong with the target is left to the deploy itself to find and to say.
        """
        modules, others = _needed(tree, plan)
        self.prepare([sha256 for _, sha256 in (*modules, *others)])
        for _, sha256 in modules:
            self._bring(sha256)
        begin([path for path, _ in modules])
        for _, sha256 in others:
            self._bring(sha256)

    def prepare(self, wanted: Sequence[str]) -> None:
        """Get ready to hand out these contents, in this order."""
        for sha in dict.fromkeys(wanted):
            if sha in self._stored or sha in self._aside or sha in self._coming:
                continue
            if self._store.whole(sha):
                self._stored.add(sha)
                self._store.touch(sha)
            else:
                self._coming.append(sha)
        if self._coming:
            self._line.say(b"N", json.dumps(self._coming).encode())

    def chunks(self, sha256: str) -> Iterator[bytes]:
        """Yield the bytes that are said to have this digest."""
        if not (sha256 in self._stored or sha256 in self._aside or sha256 in self._coming):
            self.prepare([sha256])
        self._bring(sha256)
        if sha256 in self._aside:
            return self._aside[sha256].chunks()
        return self._store.chunks(sha256)

    def _bring(self, sha256: str) -> None:
        while sha256 in self._coming:
            self._take_next()

    def _take_next(self) -> None:
        """Set the next content aside; what it really is, its reader finds out."""
        sha256 = self._coming.pop(0)
        aside = self._aside[sha256] = self._store.aside(sha256)
        whole = False
        try:
            for chunk in self._frames():
                self.received += len(chunk)
                aside.write(chunk)
            whole = True
        except OSError as err:
            raise Refused(
                "the target has no room to set contents aside",
                why=f"{err.strerror}, in /tmp and /var/tmp as well as in state_dir",
                fix="make room there; nothing was changed",
            ) from err
        finally:
            aside.end(whole=whole)

    def _frames(self) -> Iterator[bytes]:
        while head := struct.unpack(">I", self._line.take(4))[0]:
            size = head & ~_PACKED
            if size > _MOST:
                raise _lost(f"a frame of {size} bytes was announced")
            body = self._line.take(size)
            yield zlib.decompressobj().decompress(body, _MOST) if head & _PACKED else body


def serve(job: Mapping[str, Any], parts: Mapping[str, str], codes: Mapping[str, Any]) -> int:
    """Do what the job asks and answer it; return 0, since the answer says how it ended.

    job: requests (each as `main.run` takes it, but for the plan; the second one runs in a process
    of its own, only if the first went well), plan (sha256 of the part that holds it), alias,
    state_dir, if_needed (first verify, and do nothing where all is well; a deploy of what is
    there already does so unasked). `parts` are texts by
    sha256, checked by the loader; `codes` are the agent's modules, compiled.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a server under nohup would have us ignore it
    line = Line()
    try:
        _answer(job, parts, codes, line)
    except Exception:  # noqa: BLE001  it is passed on whole, to where a person sees it
        import traceback

        line.say(b"X", traceback.format_exc().encode("utf-8", "backslashreplace"))
    return 0


def _answer(
    job: Mapping[str, Any], parts: Mapping[str, str], codes: Mapping[str, Any], line: Line
) -> None:
    store = Store(job["state_dir"])
    plan = json.loads(parts[job["plan"]])
    requests = [{**request, "plan": plan} for request in job["requests"]]
    # Made before anything is changed, and before there are threads: the process that verifies is
    # not the one that applied, and has none of its memory.
    check = Later(_check(requests)) if job["if_needed"] or _is_there(requests) else None
    later = [Later(request) for request in requests[1:]]
    line.watch()
    said = _in_turn(requests[0], check, later, StreamBlobs(line, store), line)
    line.done()
    stored = _keep(store, {sha: text.encode() for sha, text in parts.items()})
    key = f"{sys.implementation.cache_tag}-{sys.hexversion:x}-{job['agent']}"
    known = {key: job["codes"][key]} if key in job["codes"] else _compiled(store, key, codes)
    store.prune({*stored, *known.values(), *_contents(plan)})
    _remember(store, job, requests[0], said)
    answer = {"evidence": said, "stored": stored, "codes": known, "store": store.trouble or "kept"}
    line.say(b"E", json.dumps(answer).encode())


def _check(requests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The verify that shows whether there is anything to do: the one that is asked for, or one."""
    asked = (request for request in requests if request["verb"] == Verb.VERIFY.value)
    return next(asked, {**requests[0], "verb": Verb.VERIFY.value})


def _is_there(requests: Sequence[Mapping[str, Any]]) -> bool:
    """True when a deploy that is to be verified is what the target has already, as it says.

    Then one verify shows all that a deploy which changes nothing and a verify would.
    """
    if [request["verb"] for request in requests] != [Verb.DEPLOY.value, Verb.VERIFY.value]:
        return False
    asked, plan = requests[0], Plan.parse(requests[0]["plan"])
    try:
        tree = TreeReader(str(asked.get("root") or "/"), str(asked.get("site") or plan.site))
        return read_receipt(tree).plan == plan.digest
    except (BundleError, OSError):
        return False  # the deploy will say it


def _in_turn(
    first: Mapping[str, Any],
    check: Later | None,
    later: Sequence[Later],
    blobs: StreamBlobs,
    line: Line,
) -> list[dict[str, Any]]:
    if check is not None:
        # Told only where it ends the matter: else the deploy tells what it finds.
        found = check.finish(None)
        if found["exit"] == Exit.OK:
            for one in later:
                one.leave()
            line.write("nothing to do: all is as planned")
            return [found]
    said = [_call(first, blobs, line)]
    said[0]["incidental"]["received"] = blobs.received
    for one in later:
        if said[-1]["exit"] != Exit.OK:
            one.leave()
            continue
        line.write(f"{one.verb}, in a process of its own")
        said.append(one.finish(line))
    return said


def _needed(tree: TreeReader, plan: Plan) -> tuple[list[_Path], list[_Path]]:
    """Return (path, sha256) of the modules that a deploy will ask for, and of other files."""
    receipt = read_receipt(tree)
    judged = judge(tree, plan, receipt, receipt.python or {"tag": ""})
    wants = {entry.path: entry.want for entry in plan.files}
    if judged.conflicts:
        return [], []
    put = [e.path for e in judged.put if e.want.type == "file" and e.path not in judged.compile]
    modules = [(path, wants[path].sha256) for path in judged.compile]
    return modules, [(path, wants[path].sha256) for path in put]


def _call(request: Mapping[str, Any], blobs: Any, err: Any) -> dict[str, Any]:
    out = io.StringIO()
    run(request, blobs, out, err)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


class Later:
    """A call that waits in a process of its own until it is its turn."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.verb = str(request["verb"])
        go, self._go = os.pipe()
        self._said, say = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(go)
            os.close(say)
            return
        code = 1
        try:
            # The line is the parent's: held open here, it would outlive it.
            nowhere = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1):
                os.dup2(nowhere, fd)
            os.close(self._go)
            os.close(self._said)
            if os.read(go, 1):
                with open(say, "w", encoding="utf-8", errors="backslashreplace") as voice:
                    voice.write(json.dumps(_call(request, MemoryBlobs(), _Lines(voice))) + "\n")
            code = 0
        finally:
            os._exit(code)

    def finish(self, line: Line | None) -> dict[str, Any]:
        """Let it do its work, pass its progress on to `line`, and return its evidence."""
        os.write(self._go, b"!")
        found = {}
        with open(self._said, encoding="utf-8") as voice:
            for text in voice:
                said = json.loads(text)
                if not isinstance(said, str):
                    found = said
                elif line is not None:
                    line.write(said)
        self.leave()
        if not found:
            raise RuntimeError(f"the process that had to {self.verb} ended without an answer")
        return found

    def leave(self) -> None:
        os.close(self._go)
        os.waitpid(self._pid, 0)


class _Lines:
    """A text stream that makes each line a JSON text of its own."""

    def __init__(self, voice: IO[str]) -> None:
        self._voice = voice

    def write(self, text: str) -> int:
        for line in filter(None, text.splitlines()):
            self._voice.write(json.dumps(line) + "\n")
        return len(text)

    def flush(self) -> None:
        self._voice.flush()


def _keep(store: Store, contents: Mapping[str, bytes]) -> list[str]:
    """Keep these, so that they need not be sent again; return the digests of those kept."""
    if store.trouble:
        return []
    for sha256, data in contents.items():
        if store.whole(sha256):
            store.touch(sha256)
            continue
        aside = store.aside(sha256)
        aside.write(data)
        aside.end(whole=True)
        aside.close()
    return sorted(sha256 for sha256 in contents if store.whole(sha256))


def _compiled(store: Store, key: str, codes: Mapping[str, Any]) -> dict[str, str]:
    """Keep the compiled agent; return its digest, which the operator has to bring next time."""
    data = marshal.dumps(dict(codes))
    kept = _keep(store, {hashlib.sha256(data).hexdigest(): data})
    return {key: kept[0]} if kept else {}


def _contents(plan: Mapping[str, Any]) -> set[str]:
    return {entry["want"]["sha256"] for entry in plan["files"] if "sha256" in entry["want"]}


def _remember(
    store: Store, job: Mapping[str, Any], request: Mapping[str, Any], said: list[dict[str, Any]]
) -> None:
    """Say of a bare site what was deployed to it before its rebuild; note what is there now."""
    plan = request["plan"]
    key = json.dumps([job["alias"], request.get("root"), request.get("site") or plan["site"]])
    known = store.recall(key)
    for found in said:
        if known and found["met"] == "first contact":
            found["met"] = "rebuilt since"
            found["before"] = {"plan": known.get("plan", "")}
            found["incidental"]["before"] = known
    first = said[0]
    if first["exit"] != Exit.OK:
        return
    if first["verb"] == Verb.DEPLOY.value:
        keys = ("host", "time")
        when = {name: str(first["incidental"].get(name, "")) for name in keys}
        store.remember(key, {"plan": first["plan"], "name": first["name"], **when})
    elif first["verb"] == Verb.RESTORE.value:
        store.remember(key, None)


def _lost(why: str) -> Interrupted:
    return Interrupted(
        "the line to the operator was lost",
        why=why,
        fix="run the same command again: it says first what had become of this one",
    )
