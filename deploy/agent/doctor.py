"""Examine a target as a whole, before anybody wonders: each finding with its level and its mend.

Everything here is read or asked; nothing is changed. A tool that is not there is a finding, not a
failure, and numbers that are known to disagree (a toolchain has half a dozen versions) are all
shown, with the one that names it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import device, faults, service
from .words import BundleError, Exit, printable

if TYPE_CHECKING:
    from .main import Call

OK, INFO, WARNING, ERROR = "ok", "info", "warning", "error"
_LEVELS = (OK, INFO, WARNING, ERROR)
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p",
                      "fuse.glusterfs", "fuse.sshfs", "fuse.juicefs", "parastor"})  # fmt: skip
_BENCHES = (
    "lib/rocblas/benchmark_tool/rocblas-bench",
    "lib/rocblas/benchmark_tool/rocblas-gemm-tune",
    "lib/hipblaslt/benchmark_tool/hipblaslt-bench",
)
_LOW = 5 << 30  # bytes of free space below which a deploy or a compile cache runs into trouble
_MARK = "dcu-doctor:"
# Runs in the service's interpreter, as the service would import; answers one framed line.
_ASK_TORCH = """
import json, sys
found = {"version": sys.version.split()[0]}
try:
    import torch
    found["torch"] = torch.__version__
    found["hip"] = torch.version.hip or ""
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found["device"] = getattr(card, "gcnArchName", "") or card.name
except BaseException as err:
    found["torch_error"] = f"{type(err).__name__}: {err}"
print("\\n" + MARK + json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. `mend` says what to do and is empty where nothing is to be done."""

    about: str
    level: str
    text: str
    mend: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def examine(call: Call) -> None:
    """Verb `doctor`: look at everything; exit 10 when something is an error."""
    found = list(findings(call))
    call.evidence["doctor"] = [finding.to_json() for finding in found]
    for finding in found:
        mend = f" -> {finding.mend}" if finding.mend else ""
        call.tell(f"{finding.level:7} {finding.about}: {finding.text}{mend}")
    worst = max((_LEVELS.index(finding.level) for finding in found), default=0)
    call.evidence["outcome"] = _LEVELS[worst]
    call.exit = Exit.DIFFERS if _LEVELS[worst] == ERROR else Exit.OK


def findings(call: Call) -> Iterator[Finding]:
    """Look at one thing after the other; one that cannot be looked at does not hide the rest."""
    for about, look in _LOOKS.items():
        try:
            yield from look(call)
        except BundleError as err:
            yield Finding(about=about, level=ERROR, text=f"{err.what}: {err.why}", mend=err.fix)
        except OSError as err:
            yield Finding(about=about, level=WARNING, text=f"cannot tell: {err}")


def _python(call: Call) -> Iterator[Finding]:
    asked = _ask_service_python(call)
    yield Finding(about="python", level=OK, text=f"{call.request.python} is {asked['version']}")
    if asked.get("torch_error"):
        yield _torch_failed(call, str(asked["torch_error"]))
        return
    hip = asked.get("hip")
    text = f"{asked['torch']}, " + (f"hip {hip}" if hip else "built without hip")
    yield Finding(about="torch", level=OK if hip else INFO, text=text)
    name = asked.get("device")
    if name:
        yield Finding(about="device", level=OK, text=str(name))


def _torch_failed(call: Call, error: str) -> Finding:
    script = call.request.env_script
    if "galaxyhip" in error or "rocm_smi" in error:
        mend = f"source {script or 'the toolchain env.sh'} first; set base.env_script"
    elif "No module named" in error:
        mend = "install torch for this interpreter, or correct base.python"
    else:
        mend = "mend the import by hand; vLLM cannot start before"
    return Finding(about="torch", level=ERROR, text=printable(error), mend=mend)


def _ask_service_python(call: Call) -> Mapping[str, Any]:
    """Ask the service's interpreter, with env_script sourced, from an empty folder."""
    import subprocess
    import tempfile

    script = call.request.env_script
    source = f". {_quoted(call.tree.from_root(script))} >/dev/null 2>&1; " if script else ""
    code = f"MARK = {_MARK!r}\n{_ASK_TORCH}"
    with tempfile.TemporaryDirectory(prefix="dcu-doctor-") as empty:
        done = subprocess.run(
            ("/bin/sh", "-c", source + 'exec "$@"', "sh", call.python_path(), "-c", code),
            cwd=empty,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=call.request.timeout,
            check=False,
        )
    text = done.stdout.decode("utf-8", "replace")
    for line in text.splitlines():
        if line.startswith(_MARK):
            found = json.loads(line[len(_MARK) :])
            assert isinstance(found, dict)
            return found
    last = text.strip().rsplit("\n", 1)[-1]
    raise OSError(f"the interpreter gave no answer (exit {done.returncode}): {printable(last)}")


def _origin(call: Call) -> Iterator[Finding]:
    """Say from where the package would be imported, from an empty folder and from launch.dir."""
    call.python()
    for where, place in sorted(call.evidence["origin"].items()):
        if place.get("state") == "ok":
            text = f"from {where}: {place.get('file', '')}"
            yield Finding(about="import", level=OK, text=text)
        else:
            text = f"from {where}: {place.get('why', '')}"
            mend = "remove what stands in front of the site, or correct base.site"
            yield Finding(about="import", level=ERROR, text=text, mend=mend)


def _toolkit(call: Call) -> Iterator[Finding]:
    """Name the toolkit by its own file: tags and tools show half a dozen other numbers."""
    top = _toolkit_folder(call)
    if not top:
        text = "neither ROCM_PATH nor /opt/dtk nor the env script's folder holds a toolkit"
        yield Finding(about="toolkit", level=INFO, text=text)
        return
    try:
        with open(os.path.join(top, ".info", "rocm_version"), encoding="utf-8") as file:
            version = file.read(64).strip()
        yield Finding(about="toolkit", level=OK, text=f"{version} in {os.path.realpath(top)}")
    except OSError:
        text = f"{top} has no .info/rocm_version, so nobody knows which toolkit this is"
        yield Finding(about="toolkit", level=WARNING, text=text, mend="install the toolkit whole")
    yield from _bench_tools(top)


def _toolkit_folder(call: Call) -> str:
    script = call.request.env_script
    candidates = (
        call.tree.from_root(os.path.dirname(script)) if script else "",
        os.environ.get("ROCM_PATH", ""),
        call.tree.from_root("/opt/dtk"),
    )
    return next((c for c in candidates if c and os.path.isdir(os.path.join(c, "bin"))), "")


def _bench_tools(top: str) -> Iterator[Finding]:
    for name in _BENCHES:
        path = os.path.join(os.path.realpath(top), name)
        if not os.path.exists(path):
            yield Finding(about="bench tool", level=INFO, text=f"{path} is not there")
        elif os.access(path, os.X_OK) and os.stat(path).st_mode & 0o111:
            yield Finding(about="bench tool", level=OK, text=path)
        else:
            mode = f"{os.stat(path).st_mode & 0o7777:04o}"
            text = f"{path} has mode {mode}: it cannot be run"
            yield Finding(about="bench tool", level=WARNING, text=text, mend=f"chmod a+x {path}")


def _cards(_: Call) -> Iterator[Finding]:
    agents = device.agents(device.ask(device.ROCMINFO).output)
    for agent in agents:
        text = f"{agent.name} {agent.marketing}, {agent.units} units, {agent.isa}"
        yield Finding(about="device", level=OK, text=text)
    seen = device.look()
    if seen["error"]:
        level = WARNING if agents else INFO
        yield Finding(about="device tool", level=level, text=seen["error"])
    for card in seen["cards"]:
        busy = "unknown" if card["busy"] is None else f"{card['busy']:g} %"
        memory = "unknown" if card["memory"] is None else f"{card['memory']:g} %"
        text = f"card {card['index']}: memory {memory}, busy {busy}, mode {card['mode'] or '?'}"
        yield Finding(about="card", level=INFO, text=text)
    for name in ("/dev/kfd", "/dev/mkfd", "/dev/dri"):
        if os.path.exists(name) and not os.access(name, os.R_OK | os.W_OK):
            text = f"{name} is there and may not be used by this user"
            mend = "add the user to the group that owns it (video, render)"
            yield Finding(about="device", level=ERROR, text=text, mend=mend)


def _variables(call: Call) -> Iterator[Finding]:
    for name in sorted(os.environ):
        if re.fullmatch(r"(https?|all)_proxy", name, re.IGNORECASE):
            text = f"{name} is set: clients of 127.0.0.1 may ask it and get 503"
            mend = f"unset {name} before a benchmark; the scripts of this bundle do"
            yield Finding(about="proxy", level=WARNING, text=text, mend=mend)
    if os.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        text = "HSA_OVERRIDE_GFX_VERSION is set: kernels of another card are loaded, or none"
        mend = "unset HSA_OVERRIDE_GFX_VERSION"
        yield Finding(about="device", level=ERROR, text=text, mend=mend)
    tuned = os.environ.get("PYTORCH_TUNABLEOP_ENABLED", "")
    if tuned not in ("", "0"):
        text = "TunableOp is on: its results decide which GEMM runs"
        mend = "lock PYTORCH_TUNABLEOP_ENABLED and its file in launch.env, or unset it"
        yield Finding(about="TunableOp", level=WARNING, text=text, mend=mend)
    folder = call.tree.from_root(call.request.launch_dir or "/")
    left = sorted(n for n in _names(folder) if re.fullmatch(r"tunableop_results.*\.csv", n))
    for name in left:
        text = f"{os.path.join(folder, name)} lies in launch.dir: TunableOp reads it from there"
        mend = "remove it, or keep it and say so in the report"
        yield Finding(about="TunableOp", level=WARNING, text=text, mend=mend)
    if tuned in ("", "0") and not left:
        yield Finding(about="TunableOp", level=OK, text="off, and no results lie in launch.dir")


def _disks(call: Call) -> Iterator[Finding]:
    folders = {"site": call.request.site, "launch.dir": call.request.launch_dir}
    for name, path in folders.items():
        full = call.tree.from_root(path) if path else ""
        if not full or not os.path.isdir(full):
            continue
        kind = filesystem(full)
        free = os.statvfs(full).f_bavail * os.statvfs(full).f_frsize
        text = f"{name} {full} is on {kind}, {free / 2**30:.1f} GiB free"
        if kind in _NETWORK:
            mend = "work on local disk: imports and builds from a shared one take minutes"
            yield Finding(about="disk", level=WARNING, text=text, mend=mend)
        elif free < _LOW:
            yield Finding(about="disk", level=WARNING, text=text, mend="free some space")
        else:
            yield Finding(about="disk", level=OK, text=text)


def filesystem(path: str) -> str:
    """Return the type of the file system that holds `path`, from the mount table."""
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            where = left.split()[4].replace("\\040", " ")
            inside = path == where or path.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best):
                best, kind = where, right.split()[0]
    return kind


def _ccache(_: Call) -> Iterator[Finding]:
    answer = device.ask(("ccache",), "--version")
    if answer.error:
        mend = "install ccache where kernels are built; a rebuild takes minutes without it"
        yield Finding(about="ccache", level=INFO, text=answer.error, mend=mend)
        return
    version = answer.output.split("\n", 1)[0].rpartition(" ")[2]
    where = device.ask((answer.path,), "-k", "cache_dir").output.strip()
    kind = filesystem(where) if where else "unknown"
    level = WARNING if kind in _NETWORK else OK
    mend = "set CCACHE_DIR to local disk" if level is WARNING else ""
    text = f"{version}, cache in {where or '?'} on {kind}"
    yield Finding(about="ccache", level=level, text=text, mend=mend)


def _leftovers(call: Call) -> Iterator[Finding]:
    """Whatever still serves, measures, listens or holds the card and should not."""
    from .serve import wanted_of

    wanted = wanted_of(call)
    seen = service.observe(wanted, ask=False)
    if seen["server"] is not None and seen["run"] is not None:
        found = faults.after_start(
            seen, wanted.launch, plan=wanted.plan, receipt=wanted.receipt, asked=False
        )
    else:
        found = faults.before_start(seen)
    for fault in found:
        level = WARNING if fault.warning else ERROR
        mend = "" if fault.warning else "./inv serve.stop, or end it by its pid if it is yours"
        yield Finding(about="left over", level=level, text=fault.text, mend=mend)
    if not found:
        yield Finding(about="left over", level=OK, text="no process, listener or card is held")


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _this(_: Call) -> Iterator[Finding]:
    yield Finding(about="agent", level=INFO, text=f"runs on Python {sys.version.split()[0]}")


_LOOKS = {
    "agent": _this,
    "python": _python,
    "import": _origin,
    "toolkit": _toolkit,
    "device": _cards,
    "variables": _variables,
    "disk": _disks,
    "ccache": _ccache,
    "left over": _leftovers,
}
