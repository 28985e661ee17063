"""A repository with the mini tree, a request to build it, and a call of what was built."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.kernels.request import BuildRequest, Wanted

TOP = Path(__file__).resolve().parents[2]
MINI = TOP / "tests" / "kernels" / "mini"
ARCH = "gfx906"  # the only one of Debian's clang that DTK's devices share
EXTENSION = Wanted(
    module="vllm._rocm_C",
    namespace="_rocm_C",
    target="_rocm_C",
    component="_rocm_C",
    ops={
        "LLMM1": "_rocm_C::LLMM1(Tensor in_a, Tensor in_b, int rows_per_block) -> Tensor",
        "paged_decay": "",
    },
)


@dataclass(frozen=True)
class Tools:
    """What tests/provision.d/kernels.sh lays out."""

    prefix: Path
    python: Path

    @property
    def env_script(self) -> Path:
        return self.prefix / "env.sh"


def provisioned() -> Tools:
    """Return where the toolchain lies, whether it is there or not."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(os.environ.get("DCU_TEST_CACHE") or f"{home}/dcu-bundle")
    return Tools(cache / "toolchain", cache / "kernels-venv" / "bin" / "python")


def own_toolchain(tools: Tools, prefix: Path) -> Tools:
    """Copy the toolchain, so that a test may change one of its files."""
    shutil.copytree(tools.prefix, prefix, symlinks=True)
    texts = [prefix / "env.sh", prefix / "llvm/bin/clang++", *(prefix / "lib").rglob("*.cmake")]
    for path in texts:
        path.write_text(path.read_text().replace(str(tools.prefix), str(prefix)))
    return replace(tools, prefix=prefix)


class Checkout:
    """A repository with the mini tree and its history."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns("__pycache__"))
        self.git("init", "-q", "-b", "main")
        self.base = self.commit("base")

    def git(self, *args: str) -> str:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "GIT_CONFIG_NOSYSTEM": "1",
            **{f"GIT_{who}_NAME": "t" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "t@example.invalid" for who in ("AUTHOR", "COMMITTER")},
        }
        done = subprocess.run(
            ("git", "-C", str(self.folder), *args),
            env=env, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.git("add", "-A", "-f")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text in one file and commit; return the commit."""
        file = self.folder / path
        text = file.read_text("utf-8")
        assert text.count(old) >= 1, f"{old!r} is not in {path}"
        file.write_text(text.replace(old, new), "utf-8")
        return self.commit(f"edit {path}")


def request_for(
    tools: Tools, checkout: Checkout, room: Path, head: str = "", **other: object
) -> BuildRequest:
    """Return a request for the mini tree with everything below `room`."""
    made = BuildRequest(
        name="mini",
        repo=checkout.folder,
        base=checkout.base,
        head=head or checkout.git("rev-parse", "HEAD"),
        arch=ARCH,
        preset="rocm-release",
        extensions=(EXTENSION,),
        python=str(tools.python),
        env_script=str(tools.env_script),
        build_dir=room / "build-dir",
        out=room / "out",
        presets=TOP / "kernels",
        ccache_dir=room / "ccache",
        jobs=2,
    )
    return replace(made, **other)  # type: ignore[arg-type]


def call_op(tools: Tools, site: Path, code: str) -> str:
    """Run code in the interpreter that the extension was built for, with `site` first."""
    env: Mapping[str, str] = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site)}
    script = f'. "{tools.env_script}"; exec "{tools.python}" -B -c "$1"'
    done = subprocess.run(
        ("/bin/sh", "-c", script, "sh", code),
        env=env, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
