"""Bytecode: made by the service's own interpreter, checked by meaning, never trusted by its date.

CPython takes a pyc for fresh when source size and mtime (in seconds) agree, so after a quick edit
it runs the old code while the source compares equal. Hence: every pyc of a touched module goes, and
one whose header holds the hash of the source (PEP 552, checked) takes its place.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from .child import Child
from .tree import TreeReader, join, split
from .words import SET_PYTHON, BundleError, Exit, Refused, Unfit, printable

MARK = b"\n\x00dcu-bundle:answer\x00\n"
CHECKED = 3  # flags of a pyc: hash based, and checked on every import

# Runs in base.python. Input: the number of jobs, then each: a line "KIND NAME SOURCE PYC" of its
# kind and three sizes, and the bytes of the three. The answer: a line "TAG VERSION MAGIC", then of
# each job a line of two sizes, its verdict, and the pyc asked for.
#   make:  compile and give back the pyc
#   check: say whether the given pyc is what this interpreter would make of the source
#   bodyN: say whether its code is (of optimisation N), if this interpreter would run it at all
# json and importlib.util would cost as much again as the start of the interpreter.
WORK = r"""
import marshal, sys
try:
    from _frozen_importlib_external import MAGIC_NUMBER
    from _imp import source_hash as keyed_hash
    def source_hash(source):
        return keyed_hash(int.from_bytes(MAGIC_NUMBER, "little"), source)
except ImportError:  # they are the interpreter's own affair; this is the public way
    from importlib.util import MAGIC_NUMBER, source_hash
def same(a, b):
    if type(a) is not type(b):
        return False
    if hasattr(a, "co_code"):
        names = [n for n in dir(a) if n.startswith("co_") and not callable(getattr(a, n))]
        return all(same(getattr(a, n), getattr(b, n)) for n in names if n not in SKIP)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    # 0.0 == -0.0 and frozensets know no order: compare what they print, sorted
    if isinstance(a, frozenset):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    return a == b and repr(a) == repr(b)
# derived from other fields, and (some) filled in as the code runs
SKIP = {"co_lnotab", "_co_code_adaptive"}
def undeclared(source):
    # Some versions let such bytes pass in a comment when importing, but not when running the file.
    try:
        source.decode("utf-8")
    except UnicodeDecodeError as err:
        import io, tokenize
        try:
            declared = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
        except SyntaxError:
            declared = "utf-8"
        if declared.startswith("utf-8"):
            line = source[:err.start].count(b"\n") + 1
            raise SyntaxError("bytes that are not UTF-8", ("", line, 0, ""))
raw, answers = sys.stdin.buffer, []
for _ in range(int(raw.readline())):
    kind, *sizes = raw.readline().split()
    kind = kind.decode()
    name, source, old = (raw.read(int(size)) for size in sizes)
    name = name.decode("utf-8", "surrogatepass")
    level = 0
    if kind.startswith("body"):
        level = int(kind[4:])
        hashed = old[4:8] == b"\3\0\0\0" and old[8:16] != source_hash(source)
        if old[:4] != MAGIC_NUMBER or hashed:
            answers.append(("same", b""))
            continue
        try:
            name = marshal.loads(old[16:]).co_filename  # that of wherever it was compiled
        except Exception:
            answers.append(("no code", b""))
            continue
    try:
        if kind[:4] != "body":
            undeclared(source)
        code = compile(source, name, "exec", dont_inherit=True, optimize=level)
    except (SyntaxError, ValueError) as err:
        answers.append(("error: %s, line %d: %s" % (
            type(err).__name__, getattr(err, "lineno", None) or 0,
            getattr(err, "msg", None) or err), b""))
        continue
    body = marshal.dumps(code, 2)
    head = MAGIC_NUMBER + b"\3\0\0\0" + source_hash(source)
    if kind == "make":
        answers.append(("made", head + body))
        continue
    if kind == "check" and old[:16] != head:
        answers.append(("stale", b""))
    elif old[16:] == body:
        answers.append(("same", b""))
    else:
        try:
            verdict = "same" if same(marshal.loads(old[16:]), code) else "wrong body"
        except Exception:
            verdict = "wrong body"
        answers.append((verdict, b""))
out = sys.stdout.buffer
version = "%d.%d.%d" % sys.version_info[:3]
info = "%s %s %s\n" % (sys.implementation.cache_tag, version, MAGIC_NUMBER.hex())
out.write(MARK + info.encode())
for verdict, made in answers:
    verdict = verdict.encode("utf-8", "replace")
    out.write(b"%d %d\n" % (len(verdict), len(made)) + verdict + made)
out.flush()
"""


# kind, file name as the interpreter will see it, source, old pyc
Job = tuple[str, str, bytes, bytes]


class Bytecode:
    """The pycs of a tree, each folder listed once: true as long as nothing is written to it."""

    def __init__(self, tree: TreeReader) -> None:
        self._tree = tree
        self._names: dict[str, list[str]] = {}

    def of(self, module: str) -> list[str]:
        """Return every pyc of the module at `module` (a path ending .py), of any interpreter."""
        folder, name = split(module)
        stem = name[: -len(".py")]
        cache = join(folder, "__pycache__")
        found = [join(cache, entry) for entry in self._starting(cache, stem + ".", stem)]
        legacy = join(folder, stem + ".pyc")  # importable without its source
        return [*found, legacy] if self._tree.exists(legacy) else found

    def _starting(self, folder: str, prefix: str, stem: str) -> Iterator[str]:
        if folder not in self._names:
            self._names[folder] = self._tree.names(folder)
        names = self._names[folder]
        for at in range(bisect_left(names, prefix), len(names)):
            if not names[at].startswith(prefix):
                break
            if belongs(names[at], stem):
                yield names[at]


def cache_file(module: str, tag: str) -> str:
    folder, name = split(module)
    return join(join(folder, "__pycache__"), f"{name[: -len('.py')]}.{tag}.pyc")


def module_of(pyc: str) -> str:
    """Return the path of the source that a pyc belongs to."""
    folder, name = split(pyc)
    if split(folder)[1] == "__pycache__":
        tag = name[: -len(".pyc")].rpartition(".")[0]
        if name.endswith(tuple(f".opt-{level}.pyc" for level in "012")):
            tag = tag.rpartition(".")[0]
        return join(split(folder)[0], tag + ".py")
    return join(folder, name[: -len("c")])


def belongs(entry: str, stem: str) -> bool:
    if not (entry.startswith(stem + ".") and entry.endswith(".pyc")):
        return False
    tag, _, optimised = entry[len(stem) + 1 : -len(".pyc")].partition(".")
    return bool(tag) and (not optimised or optimised.startswith("opt-"))


class Compiler:
    """One or two children of the service's interpreter that compile or check, started at once."""

    def __init__(self, python: str, jobs: Sequence[Job], timeout: float) -> None:
        self._timeout = timeout
        self._parts = _halves([(i, job) for i, job in enumerate(jobs)])
        self._count = len(jobs)
        self._python = python
        self._children = [_start(python, [job for _, job in part]) for part in self._parts]

    def finish(self) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
        """Return what the interpreter is, and (verdict, pyc) for every job in order.

        A verdict is "made", "same", "stale", "wrong body", or "error: TYPE, line N: message".
        """
        results: list[tuple[str, bytes]] = [("", b"")] * self._count
        info: dict[str, str] = {}
        try:
            for part, child in zip(self._parts, self._children, strict=True):
                info, answers = self._answers(child, len(part))
                for (index, _), answer in zip(part, answers, strict=True):
                    results[index] = answer
        finally:
            self.cancel()
        return info, results

    def cancel(self) -> None:
        """End what still runs. May be called again."""
        for child in self._children:
            child.kill()

    def _answers(self, child: Child, count: int) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
        try:
            status, out, err = child.finish(self._timeout)
        except TimeoutError as late:
            raise self._failed(str(late)) from late
        _, mark, answer = out.partition(MARK)
        if status or not mark:
            last = err.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise self._failed(f"it ended with {status}: {printable(last[0])}")
        try:
            return understood(answer, count)
        except ValueError as torn:
            raise self._failed(f"its answer cannot be read: {torn}") from torn

    def _failed(self, why: str) -> BundleError:
        return Unfit(
            "the service's interpreter cannot compile",
            why=f"{printable(self._python)}: {why}",
            fix="start it by hand on the target; base.python must be the service's own interpreter",
        )


def _halves(
    jobs: list[tuple[int, Job]],
) -> list[list[tuple[int, Job]]]:
    """Split the jobs in two of about equal size where a second core can help."""
    total = sum(len(job[2]) for _, job in jobs)
    if total < 60_000 or len(jobs) < 2 or (os.cpu_count() or 1) < 2:
        return [jobs] if jobs else []
    jobs = sorted(jobs, key=lambda item: (-len(item[1][2]), item[0]))
    parts: list[list[tuple[int, Job]]] = [[], []]
    sizes = [0, 0]
    for item in jobs:
        smaller = 0 if sizes[0] <= sizes[1] else 1
        parts[smaller].append(item)
        sizes[smaller] += len(item[1][2])
    return parts


def understood(answer: bytes, count: int) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
    """Read what WORK wrote. Raises ValueError."""
    head = answer.partition(b"\n")[0]
    info = dict(zip(("tag", "version", "magic"), head.decode().split(" "), strict=True))
    results, at = [], len(head) + 1
    for _ in range(count):
        end = answer.index(b"\n", at)
        verdict, made = map(int, answer[at:end].split())
        middle, at = end + 1 + verdict, end + 1 + verdict + made
        results.append((answer[end + 1 : middle].decode("utf-8", "replace"), answer[middle:at]))
    if at > len(answer):  # what comes after it was printed by somebody at the interpreter's end
        raise ValueError(f"{len(answer)} bytes of {at}")
    return info, results


def question(jobs: Sequence[Job]) -> bytes:
    """Return what WORK reads."""
    data = [b"%d\n" % len(jobs)]
    for kind, place, source, old in jobs:
        name = place.encode("utf-8", "surrogatepass")
        sizes = b"%d %d %d\n" % (len(name), len(source), len(old))
        data += [kind.encode(), b" ", sizes, name, source, old]
    return b"".join(data)


def _start(python: str, jobs: Sequence[Job]) -> Child:
    # An empty environment and a fixed hash seed: the order of sets must not change the bytes.
    argv = (python, "-S", "-s", "-c", f"MARK = {MARK!r}\n{WORK}")
    try:
        return Child(argv, {"PYTHONHASHSEED": "0"}, question(jobs))
    except OSError as err:
        raise Unfit(
            "the service's interpreter does not start",
            why=f"{printable(python)}: {err.strerror}",
            fix=f"{SET_PYTHON} to the service's interpreter",
        ) from err


def refuse_errors(failed: Sequence[tuple[str, str]]) -> None:
    """Raise Refused when a source does not compile; `failed` holds (path, verdict)."""
    if failed:
        lines = "; ".join(f"{printable(path)}: {printable(text)}" for path, text in failed)
        raise Refused(
            f"{len(failed)} of the plan's modules do not compile on this target",
            why=lines,
            fix="mend the source, or look whether base.python is the service's interpreter",
            exit=Exit.REFUSED,
        )
