"""Build the asked extensions from one commit, and take nothing that is not proved to be fresh.

`build` is the face: lay out the source, configure, compile until nothing is left, look whether all
of it comes from the present source, install into a stage, and take the result from there. Every
stage may stop it; the artefacts of an earlier build are then gone, never half replaced. `audit`
asks the same questions of a folder that was built before, and changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.errors import BadValues

from . import arch as archs
from . import ccache, disk, elf, log, ninja, objects, preset, proof, record, results, tree, twins
from .request import Artefact, Build, BuildRequest
from .runner import Local, Runner
from .workshop import Workshop, ccache_dir, say, tools_of

CONFIGURE_SECONDS = 1800
BUILD_SECONDS = 4 * 3600
INSTALL_SECONDS = 600
PASSES = 5  # a header may be copied after ninja looked: one more; what includes it: one more


def build(request: BuildRequest, runner: Runner | None = None) -> Build:
    """Build, prove and collect; return the artefacts with their evidence.

    Raises:
        BadValues: the source does not build, or a proof fails. Unfit: a tool is missing, or
        the folder is on shared storage. Refused: the disk is full, or another build runs there.
    """
    archs.asked(request.arch)
    runner = runner or Local()
    tools = tools_of(request, runner)  # first: without them nothing is made and left behind
    with record.locked(request.build_dir) as lock, _full_disk(request.build_dir):
        runner.hold(lock)
        found = disk.require_local(request.build_dir)
        say(f"{request.build_dir}: {found.type}, {found.latency_us:.0f} us a call")
        record.own(request.build_dir, request.out)
        ccache_dir(request).mkdir(parents=True, exist_ok=True)
        shop = Workshop.open(request, runner, tools)
        laid, warnings = _lay(shop)
        reasons = shop.why_clean(laid.listing)
        if not reasons and (done := _nothing_to_do(shop, laid)):
            return done
        with results.logs_kept(request):
            return _Run(shop, found, laid, reasons, warnings).whole()


def audit(request: BuildRequest, runner: Runner | None = None) -> proof.Findings:
    """Say whether the last build in this folder still stands for the request; change nothing."""
    shop = Workshop.open(request, runner or Local())
    listing = tree.of(shop.git, request.head).listing
    faults = [*shop.why_clean(listing)]
    if not shop.before.complete:
        faults.append("no build in this folder has come to its end")
    there = tree.scan(request.source)
    if other := sorted(p for p in {*there, *listing} if there.get(p) != listing.get(p)):
        faults.append(
            f"the source folder is not commit {request.head[:12]}: {', '.join(other[:5])}"
        )
    if not faults:
        rows = results.hipified(shop.before.evidence, request)
        converted = twins.faults(request.source, request.binary, rows, listing)
        faults += [f"{fault.path}: {fault.why}" for fault in converted]
        faults += [
            f"{item.path} was compiled from other text" for item in shop.stale_objects(listing)
        ]
        faults += [f"ninja still wants to run: {step[:120]}" for step in shop.pending()]
    if shop.before.complete and results.kept(shop.before, request) is None:
        faults.append(f"{request.out} does not hold the artefacts of the last build")
    tree_id = shop.before.tree
    return proof.Findings((f"source tree {tree_id}",) if not faults else (), tuple(faults))


@dataclass
class _Run:
    """One build under way, once it is known that there is something to do."""

    shop: Workshop
    disk: disk.Disk
    laid: tree.Laid
    reasons: Sequence[str]
    warnings: list[str]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request = self.shop.request
        self.before = self.shop.before

    def whole(self) -> Build:
        shutil.rmtree(self.request.build_dir / "logs", ignore_errors=True)
        results.forget(self.request.out)
        changed = sorted(self.before.differs(self.laid.listing)) if not self.reasons else []
        if self.reasons:
            say(f"configuring from clean: {self.reasons[0]}")
            shutil.rmtree(self.request.binary, ignore_errors=True)
        asked = self.shop.asked(self.laid.listing)
        self.record = record.started(self.shop.before, asked, self.shop.known, self.request.head,
                                     clean=bool(self.reasons))  # fmt: skip
        self.stats = self.shop.statistics()
        with preset.placed(self.shop.preset, self.request.source):
            if self.reasons:
                self._configure()
            self._check_commands()
            self._forget_changed(changed)
            facts = self._compile()
        self._source_is_untouched()
        staged = self._install()
        return self._conclude(facts, staged)

    def _configure(self) -> None:
        argv = (self.shop.chain.tool("cmake"), "--preset", self.shop.preset.name, "-S", ".")
        if self.shop.command("configure", argv, CONFIGURE_SECONDS):
            text = self.shop.log("configure").read_text("utf-8", "replace")
            raise proof.configure_failed(text, self.request, self._kept("configure"))

    def _check_commands(self) -> None:
        """Look at the archs on the command lines that ninja would run, before it runs any."""
        lines = self.shop.ninja("-t", "commands", *self.shop.targets).splitlines()
        found = [step for line in lines if (step := log.command(line))]
        self.commands = log.Facts(compiled=tuple(found))
        proof.only_arch(self.request, self.commands)
        if any("nvcc" in log.programs(line) for line in lines):
            raise BadValues(
                "a CUDA compiler would compile the kernels",
                why=f"nvcc stands on a command line of the build ({self.shop.chain.nvcc})",
                fix="set base.env_script to the toolchain's env.sh, which sets ROCM_PATH",
            )

    def _forget_changed(self, changed: Sequence[str]) -> None:
        """Remove whatever of the build folder was made from sources that have changed since."""
        binary = self.request.binary
        ninja.clear(binary)
        twins.forget(binary, changed)
        for item in self.shop.stale_objects(self.laid.listing):
            (binary / item.path).unlink(missing_ok=True)
        # The library is linked again in every run: it may be ahead of the clock, or not ours.
        for target in self.shop.targets:
            for library in binary.glob(f"{target}.*so"):
                library.unlink()

    def _compile(self) -> log.Facts:
        argv = (
            *(self.shop.chain.tool("cmake"), "--build", "--preset", self.shop.preset.name, "-v"),
            *("--target", *self.shop.targets),
        )
        passes: list[log.Facts] = []
        left: list[str] = []
        while len(passes) < PASSES:
            name = f"build-{len(passes) + 1}"
            code = self.shop.command(name, argv, BUILD_SECONDS)
            passes.append(log.read(self.shop.log(name).read_text("utf-8", "replace")))
            if code:
                raise proof.build_failed(passes[-1], self._kept(name), self.request.build_dir)
            left = self.shop.pending()
            if not left:
                self.passes = len(passes)
                return log.joined(passes)
            say(f"{name} left something to do: {left[0][:90]}")
        raise BadValues(
            f"the build does not come to an end after {PASSES} passes",
            why=f"ninja still wants to run: {left[0][:200]}",
            fix="look for a step in CMakeLists.txt whose output is always older than its input",
        )

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
                *(self.shop.chain.tool("cmake"), "--install", str(self.request.binary)),
                *("--component", want.component, "--prefix", str(stage)),
            )
            if self.shop.command("install", argv, INSTALL_SECONDS):
                raise results.install_failed(want, self._kept("install"), self.shop.log("install"))
            taken.append(results.staged(stage, want))
        return tuple(taken)

    def _conclude(self, facts: log.Facts, staged: Sequence[tuple[Artefact, elf.Facts]]) -> Build:
        items = self.shop.dependencies()
        known = {} if self.reasons else self.shop.known_objects(self.laid.listing)
        made_from = proof.objects_are_fresh(items, facts, known, self.shop.contents(items))
        proof.twins_are_fresh(self.request, facts, self.laid.listing)
        used = proof.sources_are_used(self.request, items)
        torch = self.shop.chain.identity["torch"]["version"]
        for artefact, found in staged:
            missing = self.shop.missing_symbols(elf.of_torch(found))
            proof.binary(found, self.request, artefact.module, missing, torch)
        self.notes += [*self.shop.preset.notes, *proof.imports(self.request)]
        evidence = results.document(
            self.shop,
            tree=self.laid.tree,
            reasons=self.reasons,
            facts=facts,
            commands=self.commands.archs,
            sources=used,
            staged=staged,
            notes=self.notes,
            warnings=self.warnings,
            incidental=self._incidental(),
        )
        artefacts = results.collect(self.request, [one for one, _ in staged], evidence)
        self.record.finish(self.laid, made_from, evidence)
        return Build(artefacts=artefacts, evidence=evidence)

    def _incidental(self) -> Mapping[str, Any]:
        after = self.shop.statistics()
        counted = ccache.difference(self.stats, after)
        warm = self.before.tree == self.laid.tree
        self.warnings += ccache.warnings(ccache_dir(self.request), counted, warm)
        return {
            "where": self.shop.runner.where,
            "disk": [self.disk.mount, self.disk.type, self.disk.latency_us],
            "ccache": {"before": self.stats, "after": after, "this_build": counted},
            "passes": self.passes,
            "seconds": self.shop.seconds,
        }

    def _kept(self, name: str) -> Path:
        """Return where a log can still be read when the build folder is gone."""
        return self.request.out / "logs" / f"{name}.log"


def _lay(shop: Workshop) -> tuple[tree.Laid, list[str]]:
    source = shop.request.source
    laid = tree.lay(shop.git, shop.request.head, source)
    ahead = objects.in_the_future(source, laid.listing)
    for path in ahead:
        os.utime(source / path, follow_symlinks=False)
    warnings = [f"times ahead of the clock, set to now: {', '.join(ahead)}"] if ahead else []
    return laid, warnings


def _nothing_to_do(shop: Workshop, laid: tree.Laid) -> Build | None:
    """Return the earlier build when every byte it rests on is still what it was."""
    before, request = shop.before, shop.request
    same = before.complete and before.tree == laid.tree and before.head == request.head
    if not same or laid.written or laid.removed or before.changed != list(request.changed):
        return None
    artefacts = results.kept(before, request)
    if artefacts is None or shop.pending() or shop.stale_objects(laid.listing):
        return None
    say("nothing to do: source, toolchain, objects and artefacts are those of the last build")
    return Build(artefacts=artefacts, evidence={**before.evidence, "rebuilt": False})


@contextlib.contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk.no_space(folder, err) from err
        raise
