"""What the log of a build says: converted, compiled, linked, and for which archs.

`read` takes the output of `cmake --build … -v`, whole or cut off, with or without colours. It is
evidence about one run; whether they prove that the binary is fresh is decided in `proof`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")
HIPIFIED = re.compile(r"(\S.*?) -> (\S.*?) \[((?:ok|skipped|ignored)[^\]]*)\]")
COUNT = re.compile(
    r"Total number of (unsupported CUDA function calls|replaced kernel launches): (\d+)"
)
ARCH_FLAGS = ("--offload-arch", "--cuda-gpu-arch", "--amdgpu-target")
WORDS = {"Building HIP object ": "hip", "Building CXX object ": "cxx", "Building C object ": "c"}
HIPIFY_WORD = "hipify"


@dataclass(frozen=True, slots=True)
class Hipified:
    """One line of hipify. `ending` is its word: ok, or why the twin was not written."""

    source: str
    twin: str
    ending: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compile step. `source` and `archs` are empty when the log was not verbose."""

    output: str
    source: str
    language: str
    archs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """All that one log says. `errors` holds the lines a person wants to see of a failed build."""

    hipified: tuple[Hipified, ...] = ()
    compiled: tuple[Compiled, ...] = ()
    linked: tuple[str, ...] = ()
    launches: int | None = None
    unsupported: int | None = None
    failed: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def archs(self) -> tuple[str, ...]:
        """Every arch that any compile step was given, sorted."""
        return tuple(sorted({arch for step in self.compiled for arch in step.archs}))

    @property
    def full(self) -> bool:
        """True when some step says it ran out of disk."""
        return any("no space left on device" in line.lower() for line in self.errors)

    def to_json(self) -> dict[str, Any]:
        return {
            "hipified": [[row.source, row.twin, row.ending] for row in self.hipified],
            "compiled": [
                {"output": s.output, "source": s.source, "archs": list(s.archs)}
                for s in self.compiled
            ],
            "linked": list(self.linked),
            "launches": self.launches,
            "unsupported": self.unsupported,
        }


def read(text: str) -> Facts:
    """Read one log. Raises nothing: what it does not know is passed over."""
    hipified, compiled, linked, failed, errors, others = [], [], [], [], [], []
    counts: dict[str, int] = {}
    for line in _lines(text):
        if step := STEP.fullmatch(line):
            found = _step(step[3])
            if isinstance(found, Compiled):
                compiled.append(found)
            elif found:
                linked.append(found)
            elif HIPIFY_WORD not in step[3]:
                others.append(step[3])
        elif row := HIPIFIED.fullmatch(line):
            hipified.append(Hipified(row[1], row[2], row[3]))
        elif count := COUNT.search(line):
            counts[count[1]] = int(count[2])
        elif line.startswith("FAILED: "):
            failed.append(line[8:].strip())
        elif _is_error(line):
            errors.append(line.strip())
    return Facts(
        hipified=tuple(hipified),
        compiled=tuple(compiled),
        linked=tuple(linked),
        launches=counts.get("replaced kernel launches"),
        unsupported=counts.get("unsupported CUDA function calls"),
        failed=tuple(failed),
        errors=tuple(errors),
        others=tuple(others),
    )


def joined(passes: Iterable[Facts]) -> Facts:
    """Return the facts of several passes of one build as those of one."""
    every = list(passes)
    twins = {row.source: row for facts in every for row in facts.hipified}
    for facts in reversed(every):  # a later "skipped" must not hide an earlier "ok"
        twins |= {row.source: row for row in facts.hipified if row.ending == "ok"}
    counted = [facts for facts in every if facts.launches is not None]
    return Facts(
        hipified=tuple(twins.values()),
        compiled=tuple(step for facts in every for step in facts.compiled),
        linked=tuple(dict.fromkeys(name for facts in every for name in facts.linked)),
        launches=counted[-1].launches if counted else None,
        unsupported=counted[-1].unsupported if counted else None,
        failed=tuple(name for facts in every for name in facts.failed),
        errors=tuple(line for facts in every for line in facts.errors),
        others=tuple(line for facts in every for line in facts.others),
    )


def command(line: str) -> Compiled | None:
    """Read one command line as ninja prints it; None when it compiles nothing."""
    if " -c " not in line and not line.endswith(" -c"):
        return None
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    output = _after(words, "-o")
    source = _after(words, "-c")
    if not output or not source:
        return None
    archs = tuple(_archs(words))
    hip = bool(archs) or _after(words, "-x") == "hip"
    return Compiled(output, source, "hip" if hip else "cxx", archs)


def programs(line: str) -> tuple[str, ...]:
    """Return the names of the programs that a command line of ninja starts, launchers included."""
    parts = re.split(r"\s&&\s", line)
    return tuple(word.rsplit("/", 1)[-1] for part in parts for word in part.split()[:2])


def _lines(text: str) -> Iterable[str]:
    for line in text.splitlines():
        # A progress line ends with a carriage return; what was written over it is not of interest.
        last = line.rstrip("\r").rsplit("\r", 1)[-1]
        yield ANSI.sub("", last).rstrip()


def _step(said: str) -> Compiled | str | None:
    for words, language in WORDS.items():
        if said.startswith(words):
            return Compiled(said[len(words) :], "", language, ())
    if said.startswith("Linking "):
        return said.rsplit(maxsplit=1)[-1]
    if found := command(said):
        return found
    if re.search(r"(^| )-(-hip-link|shared)( |$)", said):
        try:
            return _after(shlex.split(said), "-o")
        except ValueError:
            return None
    return None


def _archs(words: list[str]) -> Iterable[str]:
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ARCH_FLAGS:
            yield value if equals else (words[at + 1] if at + 1 < len(words) else "")


def _after(words: list[str], flag: str) -> str:
    """Return the last word that follows `flag`; a compiler too takes the last."""
    places = [at for at, word in enumerate(words[:-1]) if word == flag]
    return words[places[-1] + 1] if places else ""


def _is_error(line: str) -> bool:
    low = line.lower()
    return bool(re.search(r"(^|\s)(fatal )?error\b:?|^ninja: |no space left on device", low))
