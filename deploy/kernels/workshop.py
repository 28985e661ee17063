"""One build folder with the tools that work in it: what is asked for, what is there, what is left.

Everything here looks; the only thing that acts is `command`, which runs one stage of a build and
keeps its log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.agent.words import digest
from deploy.errors import Unfit
from deploy.git import Git

from . import ccache, ninja, objects, outside, preset, record, symbols, toolchain
from .request import BuildRequest
from .runner import Runner
from .tree import Listing

OUTSIDE_SECONDS = 600  # thousands of headers may lie on a cold shared disk

Tools = tuple[toolchain.Toolchain, dict[str, str]]


def tools_of(request: BuildRequest, runner: Runner) -> Tools:
    """Look at the toolchain; return it with the digests of its large files. Writes nothing.

    Raises:
        Unfit: a tool is missing.
    """
    known = dict(record.read(request.build_dir).files)
    return toolchain.survey(request, runner, known), known


@dataclass
class Workshop:
    """`before` is what the folder remembers, `known` its digests of large toolchain files."""

    request: BuildRequest
    runner: Runner
    before: record.Record
    chain: toolchain.Toolchain
    preset: preset.Preset
    env: Mapping[str, str]
    known: Mapping[str, str]
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, request: BuildRequest, runner: Runner, tools: Tools | None = None) -> Workshop:
        """Look at the toolchain, unless it is told, and at what the folder remembers.

        Raises:
            Unfit: a tool is missing. BadValues: the preset cannot be used.
        """
        chain, known = tools or tools_of(request, runner)
        before = record.read(request.build_dir)
        rendered = _preset(request, chain)
        cached = ccache.environment(
            ccache_dir(request), request.ccache_size, request.build_dir, chain.digest
        )
        env = {**ccache.without(chain.env), **cached}
        return cls(request, runner, before, chain, rendered, env, known)

    @property
    def git(self) -> Git:
        return Git(self.request.repo, self.request.own_repo)

    @property
    def targets(self) -> list[str]:
        return [want.target for want in self.request.extensions]

    def asked(self, listing: Listing) -> dict[str, Any]:
        """Return all that a build folder is configured for; another value means a new one."""
        configuration = {p: list(r) for p, r in listing.items() if record.configured_by(p)}
        stable = ccache.without(toolchain.recorded(self.env))
        return {
            # The first that differs is told, so what explains the others comes first.
            "source": str(self.request.source),
            "binary": str(self.request.binary),
            "arch": self.request.arch,
            "preset": digest(dict(self.preset.document)),
            "toolchain": self.chain.digest,
            "environment": digest(stable),
            "targets": self.targets,
            # Values that a first configure run cached outlive an edit of what set them.
            "configuration": digest(configuration),
        }

    def why_clean(self, listing: Listing) -> tuple[str, ...]:
        """Return the reasons to configure in an empty folder."""
        return record.why_clean(self.before, self.asked(listing), self.request)

    def pending(self) -> list[str]:
        """Return the steps that ninja would run now, but for the one that always runs."""
        return ninja.pending(self.ninja, self.request.binary, self.targets)

    def dependencies(self) -> tuple[objects.Object, ...]:
        """Return the objects there are, with what the compiler said it read for each."""
        if not (self.request.binary / "build.ninja").exists():
            return ()
        said = self.ninja("-t", "deps")
        places = (self.request.binary, self.request.source)
        folders = objects.searched(self.ninja("-t", "commands", *self.targets), self.env, *places)
        found = objects.dependencies(said, *places, folders)
        # ninja remembers the objects of targets that nobody builds any more.
        return tuple(item for item in found if (self.request.binary / item.path).is_file())

    def contents(self, items: Iterable[objects.Object]) -> objects.Contents:
        """Return the digests of all inputs; those outside are taken where the toolkit lies."""
        names = sorted({n for item in items for n in item.inputs if n.startswith("/")})
        code = Path(outside.__file__).read_text("utf-8")
        argv = (self.request.python, "-I", "-S", "-B", "-c", code, *outside.packed(names))
        said = self.runner.ask(argv, env=self.env, cwd=Path("/"), seconds=OUTSIDE_SECONDS)
        _, mark, answer = said.rpartition(outside.MARK)
        if not mark:
            raise Unfit(
                "what the compilers read outside cannot be told",
                why=f"{self.request.python} ended well and printed nothing",
                fix="start it by hand: base.python must be an interpreter, not a script around one",
            )
        digests: list[str] = json.loads(answer.splitlines()[0])
        known = dict(zip(names, digests, strict=True))
        return objects.Contents(self.request.binary, self.request.source, known)

    def known_objects(self, listing: Listing) -> Mapping[str, str]:
        """Return what the objects of the last build came from, if they can be this tree's."""
        return {} if self.before.moved(listing) else self.before.objects

    def stale_objects(self, listing: Listing) -> tuple[objects.Object, ...]:
        """Return the objects that are not what a compile of this tree would give."""
        items = self.dependencies()
        return objects.stale(items, self.known_objects(listing), self.contents(items))

    def ninja(self, *args: str) -> str:
        argv = (self.chain.tool("ninja"), *args)
        return self.runner.ask(argv, env=self.env, cwd=self.request.binary)

    def missing_symbols(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that no library of the build's torch defines."""
        listed = self.request.build_dir / "symbols.json"
        listed.write_text(json.dumps(list(names)), "utf-8")
        folder = os.path.join(self.chain.identity["torch"]["folder"], "lib")
        code = Path(symbols.__file__).read_text("utf-8")
        argv = (self.request.python, "-I", "-S", "-B", "-c", code, str(listed), folder)
        said = self.runner.ask(argv, env=self.env, cwd=self.request.build_dir)
        found: list[str] = json.loads(said.rsplit("symbols/1 ", 1)[1].splitlines()[0])
        return found

    def statistics(self) -> dict[str, int]:
        return ccache.statistics(self.chain.tool("ccache"), self.runner, self.env)

    def log(self, name: str) -> Path:
        return self.request.build_dir / "logs" / f"{name}.log"

    def command(self, name: str, argv: tuple[str, ...], seconds: int) -> int:
        """Run one stage in the source folder; its output goes to the log of that name."""
        say(f"{name}: {' '.join(argv[:4])} …")
        path = self.log(name)
        path.parent.mkdir(exist_ok=True)
        start = time.monotonic()
        cwd = self.request.source
        code = self.runner.run(argv, env=self.env, cwd=cwd, log=path, seconds=seconds)
        self.seconds[name] = round(time.monotonic() - start, 2)
        return code


def ccache_dir(request: BuildRequest) -> Path:
    return request.ccache_dir or request.build_dir.parent / "ccache"


def say(line: str) -> None:
    print(f"kernels: {line}", file=sys.stderr, flush=True)


def _preset(request: BuildRequest, chain: toolchain.Toolchain) -> preset.Preset:
    values = {
        "ARCH": request.arch,
        "BINARY": str(request.binary),
        "CCACHE": chain.tool("ccache"),
        "HIP_COMPILER": chain.identity["hip"]["path"],
        "JOBS": str(request.jobs or os.cpu_count() or 1),
        "PYTHON": request.python,
        "ROCM": chain.rocm,
        "STAGE": str(request.build_dir / "stage"),
    }
    found = preset.render(request.presets, request.preset, values)
    toolchain.check_preset(found.needs, chain)
    return found
