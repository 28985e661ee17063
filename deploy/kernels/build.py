"""Build the asked extensions from one commit, and take nothing that is not proved to be fresh.

`build` is the face: lay out the source, configure, compile until nothing is left, look whether
all of it comes from the present source, install into a stage, and take the result from there. Every
stage may stop it; the artefacts of an earlier build are then gone, never half replaced.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.agent.words import BundleError, digest
from deploy.errors import BadValues, Refused
from deploy.git import Git

from . import arch as archs
from . import ccache, disk, elf, log, ninja, objects, preset, proof, record, toolchain, tree, twins
from .request import Artefact, Build, BuildRequest, Wanted
from .runner import Local, Runner

SCHEMA = "kernels/1"
CONFIGURE_SECONDS = 1800
BUILD_SECONDS = 4 * 3600
PASSES = 5  # a header may be copied after ninja looked: one more; a file that includes it: one more


def build(request: BuildRequest, runner: Runner | None = None) -> Build:
    """Build, prove and collect; return the artefacts with their evidence.

    Raises:
        BadValues: the source does not build, or a proof fails. UnfitTarget: a tool is missing, or
        the folder is on shared storage. Refused: the disk is full, or another build runs there.
    """
    archs.asked(request.arch)
    with record.locked(request.build_dir), _full_disk(request.build_dir):
        run = _Run(request, runner or Local())
        try:
            return run.whole()
        finally:
            run.keep_logs()


@dataclass
class _Run:
    """One build under way. The stages fill it in from top to bottom."""

    request: BuildRequest
    runner: Runner
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def whole(self) -> Build:
        self.disk = disk.require_local(self.request.build_dir)
        _say(f"{self.request.build_dir}: {self.disk.type}, {self.disk.latency_us:.0f} us a call")
        self.before = record.read(self.request.build_dir)
        self.chain = self._survey()
        self.preset = self._preset()
        self.laid = self._lay()
        asked = self._asked()
        reasons = record.why_clean(self.before, asked, self.request)
        if not reasons and (done := self._nothing_to_do()):
            return done
        _forget(self.request.out)
        self._make(asked, reasons)
        taken = self._install()
        return self._conclude(reasons, taken)

    def _survey(self) -> toolchain.Toolchain:
        known = dict(self.before.files)
        chain = toolchain.survey(self.request, self.runner, known)
        self.known = known
        folder = self.request.ccache_dir or self.request.build_dir.parent / "ccache"
        folder.mkdir(parents=True, exist_ok=True)
        self.ccache_dir = folder
        cached = ccache.environment(
            folder, self.request.ccache_size, self.request.build_dir, chain.digest
        )
        self.env = {**chain.env, **cached}
        return chain

    def _preset(self) -> preset.Preset:
        values = {
            "ARCH": self.request.arch,
            "BINARY": str(self.request.binary),
            "CCACHE": self.chain.tool("ccache"),
            "HIP_COMPILER": self.chain.identity["hip"]["path"],
            "JOBS": str(self.request.jobs or os.cpu_count() or 1),
            "PYTHON": self.request.python,
            "ROCM": self.chain.rocm,
            "STAGE": str(self.request.build_dir / "stage"),
        }
        found = preset.render(self.request.presets, self.request.preset, values)
        toolchain.check_preset(found.needs, self.chain)
        return found

    def _lay(self) -> tree.Laid:
        source = self.request.source
        record.own(self.request.build_dir)
        # One cut off in the middle may have left our preset behind; it is none of the commit's.
        laid = tree.lay(Git(self.request.repo, self.request.own_repo), self.request.head, source)
        ahead = objects.in_the_future(source, laid.listing)
        for path in ahead:
            os.utime(source / path, follow_symlinks=False)
        if ahead:
            self.warnings.append(f"times ahead of the clock, set to now: {', '.join(ahead)}")
        return laid

    def _asked(self) -> dict[str, Any]:
        """Return all that a build folder was configured for; another value means a new one."""
        return {
            "arch": self.request.arch,
            "preset": digest(dict(self.preset.document)),
            "toolchain": self.chain.digest,
            "environment": digest(_stable(self.env)),
            "source": str(self.request.source),
            "binary": str(self.request.binary),
            "targets": [want.target for want in self.request.extensions],
            # Values that a first configure run cached outlive an edit of what set them.
            "configuration": digest(
                {p: list(r) for p, r in self.laid.listing.items() if record.configured_by(p)}
            ),
        }

    def _nothing_to_do(self) -> Build | None:
        """Return the earlier build when every byte it rests on is still what it was."""
        if not self.before.complete or self.before.tree != self.laid.tree:
            return None
        if self.before.head != self.request.head or self.laid.written or self.laid.removed:
            return None
        artefacts = record.kept(self.before, self.request)
        if artefacts is None or self._pending() or self._stale_objects():
            return None
        evidence = {**self.before.evidence, "rebuilt": False}
        _say("nothing to do: source, toolchain, objects and artefacts are those of the last build")
        return Build(artefacts=artefacts, evidence=evidence)

    def _make(self, asked: Mapping[str, Any], reasons: Sequence[str]) -> None:
        binary = self.request.binary
        shutil.rmtree(self.request.build_dir / "logs", ignore_errors=True)
        if reasons:
            _say(f"configuring from clean: {reasons[0]}")
            shutil.rmtree(binary, ignore_errors=True)
        changed = sorted({*self.before.differs(self.laid.listing)}) if not reasons else []
        self.record = record.started(self.request, self.before, asked, self.known, bool(reasons))
        self.stats = ccache.statistics(self.chain.tool("ccache"), self.runner, self.env)
        with preset.placed(self.preset, self.request.source):
            if reasons:
                self._configure()
            self._check_commands(fresh=bool(reasons))
            self._forget_changed(changed)
            self._compile()
        self._source_is_untouched()

    def _configure(self) -> None:
        argv = (self.chain.tool("cmake"), "--preset", self.preset.name, "-S", ".")
        code = self._command("configure", argv, self.request.source, CONFIGURE_SECONDS)
        if code:
            text = self._log("configure").read_text("utf-8", "replace")
            raise proof.configure_failed(text, self.request, self._log("configure"))

    def _check_commands(self, fresh: bool) -> None:
        """Look at the archs on the command lines that ninja would run, before it runs any."""
        commands = self._ninja("-t", "commands", *self._targets()).splitlines()
        found = [step for line in commands if (step := log.command(line))]
        self.commands = log.Facts(compiled=tuple(found))
        proof.only_arch(self.request, self.commands, fresh)
        for line in commands:
            if "nvcc" in log.programs(line):
                raise BadValues(
                    "a CUDA compiler would compile the kernels",
                    why=f"nvcc stands on a command line of the build ({self.chain.nvcc})",
                    fix="set base.env_script to the toolchain's env.sh, which sets ROCM_PATH",
                )

    def _forget_changed(self, changed: Sequence[str]) -> None:
        """Remove whatever of the build folder was made from sources that have changed since."""
        binary = self.request.binary
        ninja.clear(binary)
        twins.forget(binary, changed)
        for item in self._stale_objects():
            (binary / item.path).unlink(missing_ok=True)
        names = [item.path for item in self._dependencies()]
        for path in objects.in_the_future(binary, names):
            self.warnings.append(f"object ahead of the clock, compiled again: {path}")
            (binary / path).unlink(missing_ok=True)

    def _compile(self) -> None:
        argv = (
            *(self.chain.tool("cmake"), "--build", "--preset", self.preset.name, "-v"),
            *("--target", *self._targets()),
        )
        passes = []
        for number in range(1, PASSES + 1):
            name = f"build-{number}"
            code = self._command(name, argv, self.request.source, BUILD_SECONDS)
            facts = log.read(self._log(name).read_text("utf-8", "replace"))
            passes.append(facts)
            if code:
                raise proof.build_failed(facts, self._log(name), self.request.build_dir)
            if not (left := self._pending()):
                break
            _say(f"pass {number} left something to do: {left[0][:90]}")
        else:
            raise BadValues(
                f"the build does not come to an end after {PASSES} passes",
                why=f"ninja still wants to run: {left[0][:200]}",
                fix="look for a step in CMakeLists.txt whose output is always older than its input",
            )
        self.passes = len(passes)
        self.facts = log.joined(passes)

    def _pending(self) -> list[str]:
        return ninja.pending(self._ninja, self.request.binary, self._targets())

    def _source_is_untouched(self) -> None:
        """Compare the source folder with the commit once more: hipify may write there."""
        now = tree.scan(self.request.source)
        added = sorted(set(now) - set(self.laid.listing))
        other = sorted(p for p, row in now.items() if self.laid.listing.get(p, row) != row)
        if added or other:
            raise BadValues(
                "the build changed its source folder",
                why=f"added: {', '.join(added) or 'none'}; changed: {', '.join(other) or 'none'}",
                fix="let the converter run in the build folder, with paths relative to it",
            )

    def _install(self) -> tuple[tuple[Artefact, elf.Facts], ...]:
        stage = self.request.build_dir / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        taken = []
        for want in self.request.extensions:
            argv = (
                *(self.chain.tool("cmake"), "--install", str(self.request.binary)),
                *("--component", want.component, "--prefix", str(stage)),
            )
            if self._command("install", argv, self.request.source, 600):
                raise BadValues(
                    f"cmake --install of component {want.component} failed",
                    why=_last_line(self._log("install")),
                    fix=f"look into {self._log('install')}",
                )
            taken.append(_staged(stage, want))
        return tuple(taken)

    def _conclude(
        self,
        reasons: Sequence[str],
        staged: Sequence[tuple[Artefact, elf.Facts]],
    ) -> Build:
        contents = objects.Contents(self.request.binary, self.request.source)
        items = self._dependencies()
        compiled = {step.output for step in self.facts.compiled}
        made_from = proof.objects_are_fresh(items, compiled, self.before.objects, contents, reasons)
        proof.twins_are_fresh(self.request, self.facts, self.laid.listing)
        used = proof.sources_are_used(self.request, items)
        torch_lib = Path(self.chain.identity["torch"]["folder"]) / "lib"
        for artefact, facts in staged:
            proof.binary(facts, self.request, artefact.module, torch_lib)
        stats = ccache.statistics(self.chain.tool("ccache"), self.runner, self.env)
        counted = ccache.difference(self.stats, stats)
        warm = bool(self.before.tree) and self.before.tree == self.laid.tree
        self.warnings += ccache.warnings(self.ccache_dir, counted, warm)
        self.notes += [*self.preset.notes, *proof.imports(self.request)]
        evidence = {
            "schema": SCHEMA,
            "name": self.request.name,
            "commit": self.request.head,
            "base": self.request.base,
            "source_tree": self.laid.tree,
            "arch": self.request.arch,
            "preset": self.preset.name,
            "toolchain": self.chain.to_json(),
            "environment": toolchain.recorded(self.env),
            "rebuilt": True,
            "configured": list(reasons),
            "log": self.facts.to_json(),
            "commands": sorted({a for step in self.commands.compiled for a in step.archs}),
            "sources": {path: list(names) for path, names in used.items()},
            "artefacts": [
                {**artefact.to_json(), "elf": facts.to_json()} for artefact, facts in staged
            ],
            "notes": self.notes,
            "warnings": self.warnings,
            "incidental": {
                "disk": [self.disk.mount, self.disk.type, self.disk.latency_us],
                "ccache": {"before": self.stats, "after": stats, "this_build": counted},
                "passes": self.passes,
                "seconds": self.seconds,
            },
        }
        artefacts = _collect(self.request, [artefact for artefact, _ in staged], evidence)
        self.record.finish(self.laid, made_from, evidence)
        return Build(artefacts=artefacts, evidence=evidence)

    def keep_logs(self) -> None:
        """Copy logs back, after a failure too: the build folder may die with its container."""
        logs = self.request.build_dir / "logs"
        if logs.is_dir():
            target = self.request.out / "logs"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(logs, target)

    def _targets(self) -> list[str]:
        return [want.target for want in self.request.extensions]

    def _dependencies(self) -> tuple[objects.Object, ...]:
        if not (self.request.binary / "build.ninja").exists():
            return ()
        said = self._ninja("-t", "deps")
        return objects.dependencies(said, self.request.binary, self.request.source)

    def _stale_objects(self) -> tuple[objects.Object, ...]:
        contents = objects.Contents(self.request.binary, self.request.source)
        return objects.stale(self._dependencies(), self.before.objects, contents)

    def _ninja(self, *args: str) -> str:
        argv = (self.chain.tool("ninja"), *args)
        return self.runner.ask(argv, env=self.env, cwd=self.request.binary)

    def _log(self, name: str) -> Path:
        return self.request.build_dir / "logs" / f"{name}.log"

    def _command(self, name: str, argv: tuple[str, ...], cwd: Path, seconds: int) -> int:
        _say(f"{name}: {' '.join(argv[:4])} …")
        path = self._log(name)
        path.parent.mkdir(exist_ok=True)
        start = time.monotonic()
        code = self.runner.run(argv, env=self.env, cwd=cwd, log=path, seconds=seconds)
        self.seconds[name] = round(time.monotonic() - start, 2)
        return code


def _staged(stage: Path, want: Wanted) -> tuple[Artefact, elf.Facts]:
    """Find the one installed file of an extension and read it."""
    found = sorted((stage / want.stem).parent.glob(Path(want.stem).name + ".*so"))
    if len(found) != 1:
        raise BadValues(
            f"component {want.component} did not install {want.module}",
            why=f"below {stage} there are {len(found)} files named {want.stem}.*so",
            fix="correct the extension's module or component in the manifest",
        )
    facts = elf.read(found[0])
    artefact = Artefact(
        module=want.module,
        path=found[0].relative_to(stage).as_posix(),
        mode=want.mode,
        size=facts.size,
        sha256=facts.sha256,
        file=found[0],
    )
    return artefact, facts


def _collect(
    request: BuildRequest, staged: Sequence[Artefact], evidence: Mapping[str, Any]
) -> tuple[Artefact, ...]:
    """Copy the artefacts out, each whole or not at all, and the evidence last."""
    taken = []
    for artefact in staged:
        target = request.out / artefact.path
        target.parent.mkdir(parents=True, exist_ok=True)
        record.put(target, artefact.file.read_bytes())
        again = hashlib.sha256(target.read_bytes()).hexdigest()
        if again != artefact.sha256:
            raise BundleError(
                f"{target} could not be written",
                why=f"read back it is {again}, the stage holds {artefact.sha256}",
                fix="check that disk, and build again",
                exit=Refused.exit,
            )
        target.chmod(int(artefact.mode, 8))
        taken.append(
            Artefact(**{**{k: getattr(artefact, k) for k in artefact.__slots__}, "file": target})
        )
    if request.base:
        record.put(request.out / "source.patch", _patch(request))
    record.put(request.out / "kernels.json", json.dumps(evidence, indent=2).encode() + b"\n")
    return tuple(taken)


def _patch(request: BuildRequest) -> bytes:
    git = Git(request.repo, request.own_repo)
    options = (
        "--no-renames",
        "--full-index",
        "--binary",
        "--no-color",
        "--no-ext-diff",
        "-p",
        "-r",
    )
    return git.run("diff-tree", *options, "--no-textconv", request.base, request.head).stdout


def _forget(out: Path) -> None:
    """Remove the results of an earlier build: from here on they are not this source's."""
    out.mkdir(parents=True, exist_ok=True)
    for name in sorted(os.listdir(out)):
        path = out / name
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def _stable(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the environment that decides what is compiled."""
    return {k: v for k, v in toolchain.recorded(env).items() if not k.startswith("CCACHE_")}


@contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk.no_space(folder, err) from err
        raise


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _say(line: str) -> None:
    print(f"kernels: {line}", file=sys.stderr, flush=True)
