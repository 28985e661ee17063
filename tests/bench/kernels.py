"""What a kernel build costs beside the plain tools it drives, on the mini tree, in one run.

The rival of an incremental build is `cmake --build` of the same edit in an equal folder, which
proves nothing about what it made. Rounds are taken in turns, as the machine may be busy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.git import Git
from deploy.kernels import build, preset, tree
from deploy.kernels.request import BuildRequest
from deploy.kernels.runner import Local
from deploy.kernels.workshop import Workshop
from tests.kernels.mini_room import TOP, Checkout, Tools, provisioned, request_for

GEMM = "csrc/rocm/skinny_gemms.cu"
ROUNDS = 5
DELAY_MS = 0.5  # each way: what a near file server adds

# Moves bytes between a client and Debian's sftp server, each after a fixed delay.
_RELAY = """\
import os, queue, subprocess, sys, threading, time
delay = float(sys.argv[1]) / 1000
server = subprocess.Popen(["/usr/lib/openssh/sftp-server"], stdin=-1, stdout=-1)
def pump(source, target):
    waiting = queue.Queue()
    def out():
        while True:
            due, piece = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not piece:
                return os.close(target)
            while piece:
                piece = piece[os.write(target, piece):]
    threading.Thread(target=out).start()
    while True:
        piece = os.read(source, 65536)
        waiting.put((time.monotonic() + delay, piece))
        if not piece:
            return
threading.Thread(target=pump, args=(0, server.stdin.fileno())).start()
pump(server.stdout.fileno(), 1)
"""


def _timed(argv: tuple[str, ...], **options: Any) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=600, **options)
    return time.perf_counter() - start


def _row(what: str, ours: float, rival: float, limit: float | None) -> dict[str, Any]:
    ratio = ours / rival
    told = "no limit" if limit is None else f"limit {limit:.2f}"
    print(f"{what}: {ours:.2f} against {rival:.2f}, ratio {ratio:.2f} ({told})")
    return {"what": what, "ours": ours, "rival": rival, "ratio": ratio, "limit": limit}


def _quiet_build(request: BuildRequest) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        made = build.build(request)
    return time.perf_counter() - start, dict(made.evidence)


def _incremental(tools: Tools, checkout: Checkout, ours: Path, plain: Path) -> dict[str, Any]:
    """Time an edit of one .cu by us, and the same by plain cmake in a folder of equal state."""
    rival = request_for(tools, checkout, plain)
    shop = Workshop.open(rival, Local())
    argv = ("cmake", "--build", str(rival.binary), "--target", "_rocm_C")
    times, text = [], (checkout.folder / GEMM).read_text()
    for number in range(ROUNDS):
        head = checkout.edit(GEMM, _factor(text), f"float sum = {number + 1}.25f")
        text = (checkout.folder / GEMM).read_text()
        mine, said = _quiet_build(request_for(tools, checkout, ours, head, changed=(GEMM,)))
        assert len(said["log"]["compiled"]) == 1
        (rival.source / GEMM).write_text(text)
        times.append((mine, _timed(argv, env=dict(shop.env))))
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    return _row("one .cu edited, seconds, against cmake --build", mine, other, 1.15)


def _factor(text: str) -> str:
    start = text.index("float sum = ")
    return text[start : text.index(";", start)]


def _no_change(tools: Tools, checkout: Checkout, room: Path) -> dict[str, Any]:
    """Time whole processes that find nothing to do."""
    head = checkout.git("rev-parse", "HEAD")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tests.bench.kernels import again;"
        "again(*sys.argv[2:])"
    )
    argv = (sys.executable, "-c", code, str(TOP), str(checkout.folder), checkout.base, head)
    times = [
        _timed((*argv, str(room)), stderr=subprocess.DEVNULL) for _ in range(ROUNDS)
    ]  # fmt: skip
    return _row("nothing changed, seconds, against 1.5 s", statistics.median(times), 1.5, 1.0)


def again(folder: str, base: str, head: str, room: str) -> None:
    """Build what is built; the body of the no-change call."""
    checkout = object.__new__(Checkout)
    checkout.folder, checkout.base = Path(folder), base
    request = request_for(provisioned(), checkout, Path(room), head, changed=(GEMM,))
    assert build.build(request).evidence["rebuilt"] is False


def _second_checkout(
    tools: Tools, checkout: Checkout, room: Path, cold: float, cache: Path
) -> list[dict[str, Any]]:
    request = request_for(tools, checkout, room, checkout.base, ccache_dir=cache)
    warm, said = _quiet_build(request)
    counted = said["incidental"]["ccache"]["this_build"]
    calls = counted["hits"] + counted["misses"]
    return [
        _row("second checkout path, ccache misses of calls", counted["misses"], calls, 0.05),
        _row("second checkout path, seconds, against cold", warm, cold, 0.35),
    ]


@contextlib.contextmanager
def _slow_folder(room: Path) -> Iterator[Path]:
    """Mount a folder of this machine through sshfs and a relay that delays."""
    far, near, relay = room / "far", room / "near", room / "relay.py"
    far.mkdir()
    near.mkdir()
    relay.write_text(_RELAY)
    command = f"ssh_command={sys.executable} {relay} {DELAY_MS}"
    subprocess.run(("sshfs", "-o", command, f"x:{far}", str(near)), check=True, timeout=30)
    try:
        yield near
    finally:
        subprocess.run(("umount", str(near)), check=True, timeout=30)


def _configure(request: BuildRequest) -> float:
    """Time a first configure run in a folder, whatever disk it lies on."""
    request.build_dir.mkdir(parents=True, exist_ok=True)
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        shop = Workshop.open(request, Local())
        tree.lay(Git(request.repo), request.head, request.source)
        argv = (shop.chain.tool("cmake"), "--preset", request.preset, "-S", ".")
        with preset.placed(shop.preset, request.source):
            assert shop.command("configure", argv, 900) == 0
    return shop.seconds["configure"]


def _shared_storage(tools: Tools, checkout: Checkout, room: Path) -> list[dict[str, Any]]:
    if shutil.which("sshfs") is None:
        print("configure on slow storage: not measured, sshfs is not installed")
        return []
    request = request_for(tools, checkout, room, checkout.base)
    local = _configure(replace(request, build_dir=room / "local"))
    with _slow_folder(room) as folder:
        slow = _configure(replace(request, build_dir=folder / "slow"))
    what = f"configure on storage {2 * DELAY_MS:g} ms away, seconds, against local disk"
    return [_row(what, slow, local, None)]


def main() -> list[dict[str, Any]]:
    tools = provisioned()
    if not tools.env_script.exists():
        print("not measured: run tests/provision.sh start hip")
        return []
    with tempfile.TemporaryDirectory() as scratch:
        top = Path(scratch)
        checkout = Checkout(top / "checkout")
        rooms = [top / name for name in ("ours", "plain", "second", "storage")]
        for room in rooms:
            room.mkdir()
        cold, _ = _quiet_build(request_for(tools, checkout, rooms[0]))
        cache = rooms[0] / "ccache"
        rows = _second_checkout(tools, checkout, rooms[2], cold, cache)
        # Each of the two has a cache of its own: the second must not hit what the first stored.
        shutil.copytree(cache, rooms[1] / "ccache")
        _quiet_build(request_for(tools, checkout, rooms[1]))
        rows.append(_incremental(tools, checkout, rooms[0], rooms[1]))
        rows.append(_no_change(tools, checkout, rooms[0]))
        return rows + _shared_storage(tools, checkout, rooms[3])


if __name__ == "__main__":
    main()
