"""Runs in the build's own environment and prints what tools it offers: one JSON line.

It is read as text and given to the service's interpreter after env_script was sourced, here or in a
container; so it uses the standard library only and imports nothing of ours.
"""

import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any


def sha256(path: str, known: dict[str, str]) -> str:
    """Hash a file; a big one comes from `known` while its inode, size and times are the same."""
    info = os.stat(path)
    parts = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    key = "|".join((os.path.realpath(path), *map(str, parts)))
    if info.st_size > 1 << 20 and key in known:
        fresh[key] = known[key]
        return known[key]
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            sha.update(piece)
    if info.st_size > 1 << 20:
        fresh[key] = sha.hexdigest()
    return sha.hexdigest()


def said(*argv: str) -> str:
    """Return the first line that a tool prints; nothing when it does not run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    text = done.stdout if done.returncode == 0 else ""
    return (text.strip().splitlines() or [""])[0]


def version(name: str) -> dict[str, str]:
    path = shutil.which(name)
    if not path:
        return {"path": "", "version": ""}
    found = re.search(r"\d+(\.\d+)+", said(path, "--version"))
    return {"path": path, "version": found[0] if found else ""}


def compiler(path: str, known: dict[str, str]) -> dict[str, Any]:
    """Digest a compiler: the file itself, the binary a wrapper hands over to, and its libraries."""
    if not path or not os.path.exists(path):
        return {"path": "", "version": "", "files": {}}
    # Told to show and not to run its commands, a driver names the real compiler in quotes.
    done = subprocess.run(
        (path, "-###", "-x", "c++", "-c", "/dev/null", "-o", "/dev/null"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stderr.strip().splitlines()
    version = [line for line in lines if re.search(r"\bversion \d", line)] or lines or [""]
    files = {"driver": sha256(path, known)}
    named = re.search(r'^ *"?([^" ]+)"? "?-?(?:cc1\b|.*-quiet)', done.stderr, re.MULTILINE)
    if named and os.path.exists(named[1]):
        real = os.path.realpath(named[1])
        lib = os.path.join(os.path.dirname(os.path.dirname(real)), "lib")
        parts = [real, os.path.join(os.path.dirname(real), "lld")]
        parts += glob.glob(lib + "/libLLVM*.so*") + glob.glob(lib + "/libclang-cpp.so*")
        files |= {os.path.basename(p): sha256(p, known) for p in sorted(parts) if os.path.exists(p)}
    return {"path": path, "version": version[0], "files": files}


def bitcode(rocm: str, known: dict[str, str]) -> dict[str, str]:
    """Digest the device libraries: part of every kernel, and no compiler cache looks at them."""
    places = ("amdgcn/bitcode", "lib/bitcode", "lib/llvm/lib/clang/*/lib/amdgcn/bitcode")
    for place in places:
        found = sorted(glob.glob(os.path.join(rocm, place, "*.bc")))
        if found:
            return {os.path.basename(path): sha256(path, known) for path in found}
    return {}


def torch_of() -> dict[str, str]:
    """Read torch's version from its file: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {"folder": "", "version": "", "hip": ""}
    folder = os.path.dirname(spec.origin)
    with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
        text = file.read()
    found = dict(re.findall(r"^(__version__|hip)\b[^=]*= ['\"]([^'\"]*)", text, re.MULTILINE))
    return {"folder": folder, "version": found.get("__version__", ""), "hip": found.get("hip", "")}


def first(*paths: str) -> str:
    return next((path for path in paths if path and os.path.exists(path)), "")


def survey(asked: dict[str, Any]) -> dict[str, Any]:
    known = asked["known"]
    rocm = os.environ.get("ROCM_PATH", "")
    clang = (
        first(*(os.path.join(rocm, p, "clang++") for p in ("llvm/bin", "lib/llvm/bin")))
        if rocm
        else ""
    )
    cxx = shutil.which("c++") or ""
    info = os.path.join(rocm, ".info/rocm_version")
    dtk = ""
    if rocm and os.path.exists(info):
        with open(info, encoding="utf-8") as file:
            dtk = file.read().strip()
    return {
        "environment": dict(os.environ),
        "tools": {name: version(name) for name in ("cmake", "ninja", "ccache")},
        "nvcc": shutil.which("nvcc") or "",
        "rocm": rocm,
        "identity": {
            "rocm": dtk,
            "hip": compiler(clang, known),
            "cxx": compiler(cxx, known),
            "bitcode": bitcode(rocm, known) if rocm else {},
            "python": sys.version.split()[0],
            "torch": torch_of(),
        },
    }


fresh: dict[str, str] = {}
if __name__ == "__main__":
    answer = survey(json.loads(sys.argv[1]))
    print("\nsurvey/1 " + json.dumps({**answer, "known": fresh}))
