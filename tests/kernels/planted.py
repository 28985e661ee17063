"""Eleven stale states, each planted for real, and the gate that finds it.

`python -m tests.kernels.planted` prints the table. A state is planted into a world where gates 1 to
4 pass, judged by the very functions of `./inv verify`, and taken away again; in between the clean
world must raise no alarm.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy import flow
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.gates import Verdict
from tests.kernels.mini_room import Checkout, Tools, own_toolchain, provisioned
from tests.kernels.mini_story import Story

GEMM = "csrc/rocm/skinny_gemms.cu"
SCALE = "csrc/core/scale.h"
BINARY = "vllm/_rocm_C.abi3.so"
PYTHON = "vllm/platforms/rocm.py"


@dataclass(frozen=True)
class Row:
    """One planted state: the gate that should find it, the one that did, and its words."""

    state: str
    wanted: int
    found: int
    words: str

    @property
    def right(self) -> bool:
        return self.wanted == self.found


class World:
    """A deployed submission with an old binary at hand. Its toolchain is ours to change."""

    def __init__(self, tools: Tools, room: Path, ccache: Path) -> None:
        self.prefix = tools.prefix
        checkout = Checkout(room / "checkout")
        self.story = Story(tools, ccache, checkout, room)
        self.outside = room / "outside/bias.h"
        self._look_outside(tools)
        checkout.edit(
            GEMM, "#include <cuda_runtime.h>", "#include <bias.h>\n#include <cuda_runtime.h>"
        )
        self.story.write(checkout.edit(GEMM, "sum = 0.0f", "sum = 0.5f"))
        flow.build_kernels("mini", self.story.layout)
        self.old = self._artefact.read_bytes()
        checkout.edit(PYTHON, "contextlib.suppress", "contextlib . suppress")
        checkout.edit("vllm/__init__.py", '"0.18.1"', '"0.18.1"  # ours')
        self.head = checkout.edit(GEMM, "sum = 0.5f", "sum = BIAS")
        self.settle()
        flow.deploy("mini", self.story.target, Request(verb=Verb.DEPLOY), self.story.layout)

    def _look_outside(self, tools: Tools) -> None:
        """Let env_script name a folder of headers that is neither source nor build folder."""
        self.outside.parent.mkdir()
        self.outside.write_text("#define BIAS 1.0f\n")
        script = self.outside.with_name("env.sh")
        on_target = self.story.root / str(script).lstrip("/")
        on_target.parent.mkdir(parents=True)
        for path in (script, on_target):
            path.write_text(f'. "{tools.env_script}"\nexport CPATH="{self.outside.parent}"\n')
        self.story.env_script = script

    @property
    def installed(self) -> Path:
        return self.story.site / BINARY

    @property
    def build_dir(self) -> Path:
        return self.story.builds / "mini"

    @property
    def _artefact(self) -> Path:
        return self.story.layout.out_of("mini") / "kernels" / BINARY

    def settle(self) -> None:
        """Build and lock the head for what the manifest asks now."""
        self.story.write(self.head)
        flow.build_kernels("mini", self.story.layout)
        flow.lock("mini", self.story.layout)

    def judged(self) -> tuple[int, str]:
        """Return the first of gates 1 to 4 that fails and its first fault; 0 when none does."""
        for number, gate in sorted(self.story.verdicts().items()):
            if number <= 4 and gate.verdict is Verdict.FAILED:
                return number, gate.faults[0]
            if number <= 4 and gate.verdict is not Verdict.PASSED:
                return number, f"{gate.verdict.value}: {gate.reason}"
        return 0, "gates 1 to 4 passed"

    @contextmanager
    def swapped(self, path: Path, data: bytes | None, *, like: bool = False) -> Iterator[None]:
        """Put other bytes (None: nothing) in the place of a file, by a new inode, for a while.

        With `like` the new file has the times of the old one.
        """
        kept = self.story.room / "kept"
        os.rename(path, kept)
        if data is not None:
            path.write_bytes(data)
            shutil.copymode(kept, path)
            if like:
                shutil.copystat(kept, path)
        try:
            yield
        finally:
            os.replace(kept, path)


@contextmanager
def extension_missing_after_a_wheel_reinstall(world: World) -> Iterator[None]:
    with world.swapped(world.installed, None):
        yield


@contextmanager
def one_of_several_files_copied(world: World) -> Iterator[None]:
    base = world.story.checkout.git("show", f"{world.story.checkout.base}:{PYTHON}") + "\n"
    with world.swapped(world.story.site / PYTHON, base.encode()):
        yield


@contextmanager
def old_binary_in_place(world: World) -> Iterator[None]:
    with world.swapped(world.installed, world.old):
        yield


@contextmanager
def same_name_from_another_source(world: World) -> Iterator[None]:
    """Python prefers its own suffix to .abi3.so."""
    ask = "import sysconfig; print(sysconfig.get_config_var('SOABI'))"
    python = str(world.story.tools.python)
    tag = subprocess.run((python, "-c", ask), check=True, capture_output=True, text=True).stdout
    other = world.installed.with_name(f"_rocm_C.{tag.strip()}.so")
    other.write_bytes(world.old)
    try:
        yield
    finally:
        other.unlink()


@contextmanager
def runpath_trap(world: World) -> Iterator[None]:
    """The build tree's own file: equal size and code, another RUNPATH."""
    with world.swapped(world.installed, (world.build_dir / "build/_rocm_C.abi3.so").read_bytes()):
        yield


@contextmanager
def stale_header(world: World) -> Iterator[None]:
    """A header replaced by one with an old time: ninja has no work to do."""
    path = world.build_dir / "src" / SCALE
    with world.swapped(path, path.read_bytes().replace(b"1.0f", b"3.0f")):
        os.utime(path, (1, 1))
        yield


@contextmanager
def header_outside(world: World) -> Iterator[None]:
    """A header of neither source nor build folder, with size and times of the one before."""
    other = world.outside.read_bytes().replace(b"1.0f", b"3.0f")
    with world.swapped(world.outside, other, like=True):
        yield


@contextmanager
def wrong_arch(world: World) -> Iterator[None]:
    """Built while the manifest said gfx90a; then the manifest is corrected, not the build."""
    world.story.write(world.head, arch="gfx90a")
    flow.build_kernels("mini", world.story.layout)
    world.story.write(world.head)
    flow.lock("mini", world.story.layout)
    flow.deploy("mini", world.story.target, Request(verb=Verb.DEPLOY), world.story.layout)
    try:
        yield
    finally:
        world.settle()
        flow.deploy("mini", world.story.target, Request(verb=Verb.DEPLOY), world.story.layout)


@contextmanager
def copied_build_folder(world: World) -> Iterator[None]:
    kept = world.story.builds
    world.story.builds = kept.with_name("moved")
    shutil.copytree(kept, world.story.builds, symlinks=True)
    world.story.write(world.head)
    flow.lock("mini", world.story.layout)
    try:
        yield
    finally:
        shutil.rmtree(world.story.builds)
        world.story.builds = kept
        world.story.write(world.head)
        flow.lock("mini", world.story.layout)


@contextmanager
def device_library_changed_behind_ccache(world: World) -> Iterator[None]:
    """Equal size and time: ccache would give back yesterday's object."""
    libraries = world.prefix / "amdgcn/bitcode"
    on, off = libraries / "oclc_daz_opt_on.bc", libraries / "oclc_daz_opt_off.bc"
    assert on.stat().st_size == off.stat().st_size
    with world.swapped(off, on.read_bytes(), like=True):
        yield


@contextmanager
def namespace_clash(world: World) -> Iterator[None]:
    """Something else on the path of the service owns the namespace already."""
    other = world.story.site / "sitecustomize.py"
    other.write_text("import torch\nOWNER = torch.library.Library('_rocm_C', 'DEF')\n")
    try:
        yield
    finally:
        other.unlink()


PLANTED: tuple[tuple[Callable[[World], contextmanager[None]], int], ...] = (  # type: ignore[type-arg]
    (extension_missing_after_a_wheel_reinstall, 3),
    (one_of_several_files_copied, 1),
    (old_binary_in_place, 3),
    (same_name_from_another_source, 3),
    (stale_header, 2),
    (header_outside, 2),
    (wrong_arch, 2),
    (runpath_trap, 3),
    (copied_build_folder, 2),
    (device_library_changed_behind_ccache, 2),
    (namespace_clash, 4),
)


def rows(world: World) -> Iterator[Row]:
    """Yield a row for the clean world and for each state; the clean one after it, if it fails."""
    yield Row("clean", 0, *world.judged())
    for plant, wanted in PLANTED:
        with plant(world):
            yield Row(plant.__name__.replace("_", " "), wanted, *world.judged())
        found, words = world.judged()
        if found:
            yield Row(f"clean after {plant.__name__}", 0, found, words)


def main() -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        tools = own_toolchain(provisioned(), Path(folder) / "toolchain")
        world = World(tools, Path(folder), Path(folder) / "ccache")
        start = time.monotonic()
        for row in rows(world):
            wrong += not row.right
            mark = "ok  " if row.right else "FAIL"
            print(f"{mark} {row.state:44} gate {row.found or '-'} (wanted {row.wanted or '-'})")
            print(f"       {row.words[:150]}")
    print(f"{wrong} wrong, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
