"""The converted copies in the build folder, and whether they come from the present sources.

hipify copies the sources into the build folder and writes a *twin* beside each copy that it had to
change. It decides by itself what to write, and nobody deletes the twin of a source that is gone. So
whatever belongs to a changed source is removed before a build, and compared after it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .log import Hipified
from .tree import files

# What hipify maps to other names or leaves out: every other word of a source stands in its twin.
_MAPPED = re.compile(
    r"(?i:cuda|hip|nccl|curand|cublas|cusparse|cusolver|cufft|^_*nv|^_*roc|rsmi|miopen|cub$)"
    r"|^cu[A-Z]|CU[A-Z_]|ROCM|^AMD_|^MA?[JI]N?OR_VERSION$|^PATCH_LEVEL$|^libraryProperty"
    r"|^(?:gesvdj|syevj)Info_t$|^mtgp32_|^(?:surface|texture)Reference$"
)
_WORD = re.compile(r"[A-Za-z_]\w*|\d[\w.]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[^\n]*$", re.MULTILINE)
# What hipify itself writes: launches become calls, math functions lose their namespace.
_ADDED = frozenset(
    {"hipLaunchKernelGGL", "dim3", "HIP_KERNEL_NAME", "HIP_DYNAMIC_SHARED", "std", "0"}
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One converted file that does not come from the present source."""

    path: str
    why: str


def names(path: str) -> tuple[str, ...]:
    """Return the copy of a source and every name that its twin may have, below the build folder."""
    folder, name = os.path.split(path)
    stem, suffix = os.path.splitext(name)
    converted = _renamed(folder), _renamed(stem), ".hip" if suffix == ".cu" else suffix
    twin = os.path.join(converted[0], converted[1] + converted[2])
    found = [path, twin, os.path.join(converted[0], f"{converted[1]}_hip{converted[2]}")]
    return tuple(dict.fromkeys(found))


def forget(binary: Path, sources: Iterable[str]) -> tuple[str, ...]:
    """Remove copy and twins of these sources; return what was there."""
    gone = []
    for source in sources:
        for name in names(source):
            if (binary / name).is_file():
                (binary / name).unlink()
                gone.append(name)
    return tuple(gone)


def faults(
    source: Path, binary: Path, rows: Sequence[Hipified], tracked: Iterable[str]
) -> list[Fault]:
    """Compare every copy with its source and every twin with its copy; list what has neither.

    `rows` are the lines of hipify, `tracked` the paths of the source tree.
    """
    known = set(tracked)
    roots = roots_of(binary, rows)
    found: list[Fault] = []
    expected = set()
    for path in sorted(known):
        copy = binary / path
        if path.split("/")[0] not in roots or not copy.is_file():
            continue
        expected.add(path)
        if copy.read_bytes() != (source / path).read_bytes():
            found.append(Fault(path, "the copy in the build folder differs from the source"))
    for row in rows:
        twin = _below(row.twin, binary)
        copy_path = _below(row.source, binary)
        if not twin or not copy_path:
            found.append(Fault(row.twin, "hipify wrote outside the build folder"))
            continue
        expected.add(twin)
        if twin != copy_path:
            found += _compare(binary, copy_path, twin)
    found += _left_over(binary, roots, expected, known)
    return found


def roots_of(binary: Path, rows: Sequence[Hipified]) -> tuple[str, ...]:
    """Return the top folders of the build folder that hipify works in, usually just csrc."""
    found = {_below(row.source, binary).split("/")[0] for row in rows}
    return tuple(sorted(name for name in found if name))


def corresponds(source: str, twin: str) -> str:
    """Return "" when `twin` can be what hipify makes of `source`, else the first word that tells.

    Compared are the words that hipify never touches, each as often as it occurs; comments and
    includes are left out. An edit that changes any name or number shows.
    """
    mine, theirs = _words(source), _words(twin)
    for word in sorted(mine):
        if mine[word] != theirs.get(word, 0):
            return f"{word!r} stands {mine[word]} times in the source, {theirs.get(word, 0)} in it"
    for word in sorted(theirs):
        if word not in mine:
            return f"{word!r} is not in the source"
    return ""


def snapshot(binary: Path, roots: Iterable[str], digest_of: Mapping[str, str]) -> dict[str, str]:
    """Return path -> digest of every file that hipify's folders hold, for the next call."""
    return {
        path: digest_of[path]
        for path in sorted(digest_of)
        if path.split("/")[0] in set(roots) and (binary / path).is_file()
    }


def _compare(binary: Path, copy: str, twin: str) -> list[Fault]:
    try:
        source_text = (binary / copy).read_text("utf-8", "replace")
        twin_text = (binary / twin).read_text("utf-8", "replace")
    except OSError as err:
        return [Fault(twin, f"hipify named it, but {err.strerror}")]
    why = corresponds(source_text, twin_text)
    return [Fault(twin, f"it was not made from the present {copy}: {why}")] if why else []


def _left_over(
    binary: Path, roots: Sequence[str], expected: set[str], tracked: set[str]
) -> list[Fault]:
    found = []
    for root in roots:
        for name in files(binary / root):
            path = f"{root}/{name}"
            if path not in expected and path not in tracked and _is_source(path):
                found.append(Fault(path, "it belongs to no source that is there now"))
    return found


def _is_source(path: str) -> bool:
    return path.endswith((".cu", ".cuh", ".hip", ".h", ".hpp", ".cpp", ".cc", ".c", ".inc"))


def _below(path: str, binary: Path) -> str:
    """Return a path of the log relative to the build folder, "" when it lies elsewhere."""
    full = os.path.normpath(os.path.join(binary, path))
    inside = full.startswith(f"{binary}/")
    return os.path.relpath(full, binary) if inside else ""


def _renamed(text: str) -> str:
    return text.replace("cuda", "hip").replace("CUDA", "HIP").replace("THC", "THH")


def _words(text: str) -> Counter[str]:
    bare = _COMMENT.sub(" ", _INCLUDE.sub(" ", text))
    every = Counter(_WORD.findall(bare))
    return Counter({w: n for w, n in every.items() if not _MAPPED.search(w) and w not in _ADDED})
