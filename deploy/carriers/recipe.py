"""A build context and its Dockerfile, looked at before anything is sent, then built.

The SDK speaks to the classic builder, which knows neither heredocs nor mounts: such lines are found
here instead of half an hour into a build.
"""

from __future__ import annotations

import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deploy.carriers.engine import Engine
from deploy.errors import BadValues

LIMIT = 15 * 2**30  # bytes; what the known sites take as one layer
_HEREDOC = re.compile(r"<<-?[\"']?[A-Za-z_]")
_MOUNT = re.compile(r"^\s*RUN\s+(--\w+\S*\s+)*--(mount|network|security)\b", re.IGNORECASE)
_SOURCES = re.compile(r"^\s*(COPY|ADD)\s+(?P<words>.+)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What would be sent: paths below `folder`, sorted, and their bytes together."""

    folder: Path
    files: tuple[str, ...]
    size: int


def build(
    engine: Engine,
    folder: Path,
    reference: str,
    tell: Callable[[str], None],
    *,
    limit: int = LIMIT,
) -> str:
    """Build the Dockerfile of `folder` with the classic builder, without network; return the id.

    Raises:
        BadValues: the builder would not understand a line, or would not get a file; nothing was
            sent and nothing is tagged.
        Refused: a step failed; nothing is tagged.
    """
    context = read_context(folder)
    require_plain((folder / "Dockerfile").read_text(encoding="utf-8"))
    require_sources(context)
    tell(f"context: {len(context.files)} files, {context.size / 1e6:.1f} MB")
    if context.size > limit:
        raise BadValues(
            f"the build context {folder} is too large",
            why=f"it has {context.size} bytes, the limit is {limit}",
            fix="exclude in .dockerignore what the Dockerfile does not copy",
        )
    with tempfile.TemporaryFile() as file:
        _pack(context, file)
        file.seek(0)
        return engine.build(file, reference, tell)


def read_context(folder: Path) -> Context:
    """Return what the builder would get, by .dockerignore's rules.

    Raises:
        BadValues: there is no Dockerfile.
    """
    from docker.utils.build import exclude_paths

    if not (folder / "Dockerfile").is_file():
        raise BadValues(
            f"{folder} is no build context",
            why="it holds no Dockerfile",
            fix="`./inv render` writes one where the manifest names a base.image",
        )
    found = exclude_paths(str(folder), _patterns(folder))
    files = tuple(sorted(name for name in found if (folder / name).is_file()))
    return Context(
        folder=folder, files=files, size=sum((folder / name).stat().st_size for name in files)
    )


def require_plain(dockerfile: str) -> None:
    """Raise BadValues, with every line, for what only a newer builder understands."""
    faults = [
        f"line {number}: {line.strip()}"
        for number, line in enumerate(dockerfile.splitlines(), 1)
        if not line.lstrip().startswith("#") and (_HEREDOC.search(line) or _MOUNT.match(line))
    ]
    if faults:
        raise BadValues(
            "this Dockerfile needs BuildKit",
            why="the classic builder has no heredoc and no RUN --mount: " + "; ".join(faults),
            fix="write these steps as plain RUN lines, or build with `docker buildx build`",
        )


def require_sources(context: Context) -> None:
    """Raise BadValues unless everything that is copied is sent; say which pattern drops it."""
    text = (context.folder / "Dockerfile").read_text(encoding="utf-8")
    faults = [
        f"{source}: {_absence(context, source)}"
        for source in _copied(text)
        if not any(name == source or name.startswith(source + "/") for name in context.files)
    ]
    if faults:
        raise BadValues(
            "the build context lacks what the Dockerfile copies",
            why="; ".join(faults),
            fix="let it through in .dockerignore with a later line `!PATH`, or render anew",
        )


def _copied(dockerfile: str) -> Iterator[str]:
    for line in dockerfile.replace("\\\n", " ").splitlines():
        match = _SOURCES.match(line)
        words = match["words"].split() if match else []
        if not any(word.startswith("--from") for word in words):
            yield from (w.rstrip("/") for w in words[:-1] if not w.startswith(("--", "http")))


def _absence(context: Context, source: str) -> str:
    if not (context.folder / source).exists():
        return "it is not there"
    patterns = _patterns(context.folder)
    for count in range(len(patterns), 0, -1):
        if _lets_through(context.folder, patterns[: count - 1], source):
            return f".dockerignore drops it by the pattern {patterns[count - 1]!r}"
    return ".dockerignore drops it"


def _lets_through(folder: Path, patterns: Sequence[str], source: str) -> bool:
    from docker.utils.build import exclude_paths

    return source in exclude_paths(str(folder), list(patterns))


def _patterns(folder: Path) -> list[str]:
    try:
        lines = (folder / ".dockerignore").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _pack(context: Context, out: IO[bytes]) -> None:
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in context.files:
            path = context.folder / name
            info = tarfile.TarInfo(name)
            info.size, info.mode = path.stat().st_size, path.stat().st_mode & 0o777
            with path.open("rb") as source:
                tar.addfile(info, source)
