"""How fast an image is built, against `docker build` and against merely loading the same bytes.

Needs the engine of tests/provision.d/docker.sh. Every figure is the best of three in one run.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deploy import scripts
from deploy.carriers import recipe
from deploy.carriers.assembly import Folders, Order, build, handed_in
from deploy.carriers.engine import Engine, open_engine
from deploy.image.archive import Reference
from deploy.image.layer import Entry
from tests.carriers import dock

ROUNDS = 3
KERNEL = 96 << 20  # bytes of compiled extensions; those of vLLM have some hundred
BENCH = Reference("dcu-test/bench", "1")


def main() -> list[dict[str, Any]]:
    with open_engine() as engine, tempfile.TemporaryDirectory() as folder:
        rows = [*_builds(engine, Path(folder)), _bases(engine, Path(folder)), _memory(Path(folder))]
    for row in rows:
        print(
            f"{row['what']}: {row['ours']:.3f} against {row['rival']:.3f}, "
            f"ratio {row['ratio']:.2f} (limit {row['limit']})"
        )
    return rows


def _row(what: str, ours: float, rival: float, limit: float) -> dict[str, Any]:
    return {"what": what, "ours": ours, "rival": rival, "ratio": ours / rival, "limit": limit}


def _best(act: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(ROUNDS):
        prepare()
        begun = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun)
    return min(times)


def _edits(number: int = 0) -> dict[str, bytes | None]:
    """The story's edits, a kernel of random bytes, and one file that is another each time."""
    kernel = random.Random(1).randbytes(KERNEL)
    changed = f"X = {number}\n".encode()
    return {**dock.EDITS, "vllm/_rocm_C.abi3.so": kernel, "vllm/layers/changed.py": changed}


def _order(folder: Path, base: str, number: int = 0) -> Order:
    manifest = dock.manifest(base)
    made = dock.bundle(folder / f"bundle{number}", _edits(number), meaning=manifest.meaning())
    rendered = scripts.on_target(manifest)
    return Order(
        bundle=made,
        base=base,
        reference=BENCH,
        epoch=dock.EPOCH,
        extras=handed_in(made, rendered),
    )


def _builds(engine: Engine, folder: Path) -> Iterator[dict[str, Any]]:
    with dock.base_image(engine) as base:
        order, where = _order(folder, base), Folders(folder / "w", folder / "c")
        build(engine, order, where)  # what the base holds, and pycs, are known from here on

        def gone() -> None:
            engine.remove_image(str(BENCH))

        warm = _best(lambda: build(engine, order, where), gone)
        context = _context(folder, base, order)
        classic = _best(
            lambda: recipe.build(engine, context, "dcu-test/bench:2", lambda _: None),
            lambda: engine.remove_image("dcu-test/bench:2"),
        )
        engine.remove_image("dcu-test/bench:2")
        yield _row("build-image with all caches, against docker build", warm, classic, 0.3)

        archive = folder / "thin.tar"
        build(engine, order, where, output=archive)
        plain = _best(lambda: _hash_and_load(archive), gone)
        orders = iter([_order(folder, base, number) for number in range(1, ROUNDS + 1)])
        changed = _best(lambda: build(engine, next(orders), where), gone)
        yield _row("one changed file, against hashing and loading the layer", changed, plain, 2.0)

        build(engine, order, where)
        nothing = _best(lambda: build(engine, order, where))
        yield _row("nothing changed, against hashing and loading the layer", nothing, plain, 0.1)
        gone()


def _context(folder: Path, base: str, order: Order) -> Path:
    context = folder / "context"
    context.mkdir()
    for one in scripts.files(dock.manifest(base)):
        (context / one.name).write_bytes(one.data)
    (context / "bundle.pyz").write_bytes(order.bundle.path.read_bytes())
    return context


def _hash_and_load(archive: Path) -> None:
    """What nobody can do without: read and hash the bytes once, and hand them to the engine."""
    digest = hashlib.sha256()
    with archive.open("rb") as source:
        while piece := source.read(1 << 20):
            digest.update(piece)
    with archive.open("rb") as source:
        subprocess.run(
            ("docker", "load", "--quiet"),
            stdin=source,
            capture_output=True,
            check=True,
            timeout=300,
        )


def _bases(engine: Engine, folder: Path) -> dict[str, Any]:
    """Two bases without Python, one ten times the other: the base is never exported."""
    tree = {**dock.VENDOR, "vllm-0.18.1.dist-info/METADATA": b""}
    times = []
    for size in (200, 20):
        ballast = Entry(path="opt/ballast", data=random.Random(size).randbytes(size << 20))
        with dock.base_image(engine, tree, on="", entries=(ballast,)) as base:
            order = _order(folder / str(size), base)
            where = Folders(folder / f"w{size}", folder / f"c{size}")

            def gone() -> None:
                engine.remove_image(str(BENCH))

            times.append(_best(lambda: build(engine, order, where, fresh=True), gone))  # noqa: B023
            gone()
    return _row("a base of 200 MB, against one of 20 MB, no cache", times[0], times[1], 1.3)


_CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.bench.image import grown
print(grown(Path(sys.argv[2])))
"""


def _memory(folder: Path) -> dict[str, Any]:
    top = str(Path(__file__).resolve().parents[2])
    argv = (sys.executable, "-c", _CHILD, top, str(folder / "memory"))
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    return _row("peak memory in MB, against the layer", float(done.stdout), KERNEL / 1e6, 2.0)


def grown(folder: Path) -> float:
    """By how many MB a build lets this process grow, beyond what the bundle's making took."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(open_engine())
        base = stack.enter_context(dock.base_image(engine))
        argv = (sys.executable, "-c", _BUILD, str(Path(__file__).resolve().parents[2]))
        order = _order(folder, base)
        words = (*argv, str(order.bundle.path), base, str(folder))
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        engine.remove_image(str(BENCH))
    return float(done.stdout)


_BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from deploy import bundle
from deploy.carriers.assembly import Folders, Order, build, handed_in
from deploy.carriers.engine import open_engine
from tests.bench.image import BENCH, dock, peak
made, base, folder = bundle.read(Path(sys.argv[2])), sys.argv[3], Path(sys.argv[4])
order = Order(bundle=made, base=base, reference=BENCH, epoch=dock.EPOCH, extras=handed_in(made, ()))
before = peak()
with open_engine() as engine:
    build(engine, order, Folders(folder / "w", folder / "c"))
print(peak() - before)
"""


def peak() -> float:
    """The most memory that this process ever held, in MB."""
    # Not getrusage: what it says of a child begins with its parent's.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


if __name__ == "__main__":
    main()
