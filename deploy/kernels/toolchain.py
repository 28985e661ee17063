"""The environment of a build: made from nothing but env_script and what is asked, then recorded.

What the operator's own shell holds (CFLAGS, PYTHONPATH, a CUDA compiler in PATH) takes no part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.agent.words import digest
from deploy.errors import BadValues, Unfit

from .preset import version_of
from .request import BuildRequest
from .runner import Runner

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SURVEY = Path(__file__).with_name("survey.py")
MARK = "survey/1 "
OLDEST_CMAKE = "3.21"
# What a toolchain's own script needs to be told, or what belongs to a person and not to a build.
PERSONAL = ("HOME", "USER", "LOGNAME", "TMPDIR")
_SOURCE = '. "$1" >&2 || exit 97; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The tools found below env_script. `identity` holds the digests of all that writes code."""

    env: Mapping[str, str]
    tools: Mapping[str, Mapping[str, str]]
    identity: Mapping[str, Any]
    rocm: str
    nvcc: str

    @property
    def digest(self) -> str:
        return digest(self.identity)

    def tool(self, name: str) -> str:
        return self.tools[name]["path"]

    def to_json(self) -> dict[str, Any]:
        return {"digest": self.digest, **self.identity, "rocm_path": self.rocm}


def survey(request: BuildRequest, runner: Runner, known: Mapping[str, str]) -> Toolchain:
    """Source env_script, look at what it offers, and return it with the environment of the build.

    `known` holds digests of large files from an earlier call and is updated in place of them.

    Raises:
        Unfit: a tool is missing or too old, or the compiler is not the one of ROCM_PATH.
    """
    asked = json.dumps({"known": dict(known)})
    # -B: a build leaves no __pycache__ in the source; -s: nor does a person's own site take part.
    command: tuple[str, ...] = (request.python, "-B", "-s", "-c", SURVEY.read_text("utf-8"), asked)
    if request.env_script:
        command = ("/bin/bash", "-c", _SOURCE, "env_script", request.env_script, *command)
    try:
        said = runner.ask(command, env=_clean(), cwd=Path("/"))
    except Unfit as err:
        raise _blind(request, runner, err.why) from err
    _, mark, answer = said.rpartition(MARK)
    if not mark:
        raise _blind(request, runner, "it ended before the interpreter was started")
    found = json.loads(answer.splitlines()[0])
    if isinstance(known, dict):
        known.clear()
        known.update(found["known"])
    chain = Toolchain(
        env=_build_env(request, found),
        tools=found["tools"],
        identity=found["identity"],
        rocm=found["rocm"],
        nvcc=found["nvcc"],
    )
    _require(chain, runner)
    return chain


def recorded(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that evidence shows: none that names a person."""
    return {key: value for key, value in sorted(env.items()) if key not in PERSONAL}


def _blind(request: BuildRequest, runner: Runner, why: str) -> Unfit:
    return Unfit(
        "cannot look at the toolchain",
        why=f"{request.env_script or request.python}: {why}",
        fix=f"correct base.env_script and base.python in the manifest{_or_in_a_container(runner)}",
    )


def _or_in_a_container(runner: Runner) -> str:
    """Where nothing of the toolkit is on this machine, the target's image has it."""
    return "; or compile in the target's image: --where container:IMAGE" * (runner.where == "local")


def _clean() -> dict[str, str]:
    kept = {key: os.environ[key] for key in PERSONAL if key in os.environ}
    return {**kept, "PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


def _build_env(request: BuildRequest, found: Mapping[str, Any]) -> dict[str, str]:
    env = dict(found["environment"])
    for shells in ("_", "PWD", "OLDPWD", "SHLVL"):
        env.pop(shells, None)
    path = f"{os.path.dirname(request.python)}:{env.get('PATH', SYSTEM_PATH)}"
    return env | {
        "PATH": path,
        "PYTORCH_ROCM_ARCH": request.arch,
        "HIP_PLATFORM": "amd",  # else a CUDA compiler anywhere in PATH is taken for the platform
        "ROCM_PATH": found["rocm"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "NINJA_STATUS": "[%f/%t] ",  # what the log is read by
        "CLICOLOR_FORCE": "0",
        "SOURCE_DATE_EPOCH": "0",
    }


def _require(chain: Toolchain, runner: Runner) -> None:
    for name, package in (("cmake", "cmake"), ("ninja", "ninja-build"), ("ccache", "ccache")):
        if not chain.tool(name):
            raise Unfit(
                f"{name} is not installed",
                why="it is not in the PATH that env_script leaves",
                fix=f"run `apt-get install {package}`, or name its folder in env_script",
            )
    if version_of(chain.tools["cmake"]["version"]) < version_of(OLDEST_CMAKE):
        raise Unfit(
            "the CMake found is too old",
            why=f"{chain.tool('cmake')} is {chain.tools['cmake']['version']},"
            f" at least {OLDEST_CMAKE} is needed for the HIP language",
            fix="install a newer one (`pip install cmake`) where base.python's scripts lie",
        )
    if not chain.identity["hip"]["path"]:
        raise Unfit(
            "no HIP compiler was found",
            why=f"ROCM_PATH is {chain.rocm or 'not set'}, and there is no llvm/bin/clang++ below it"
            + (f"; {chain.nvcc} is a CUDA compiler and is not used" if chain.nvcc else ""),
            fix="set base.env_script to the toolchain's env.sh, for instance /opt/dtk/env.sh"
            + _or_in_a_container(runner),
        )
    if not chain.identity["torch"]["version"]:
        raise Unfit(
            "base.python has no torch",
            why="its torch converts the sources and is linked against",
            fix="correct base.python, or install torch for it" + _or_in_a_container(runner),
        )


def check_preset(needs: str, chain: Toolchain) -> None:
    """Raise BadValues when this CMake cannot read a preset file that needs CMake `needs`."""
    found = chain.tools["cmake"]["version"]
    if version_of(found) < version_of(needs):
        raise BadValues(
            "the preset file is too new for this CMake",
            why=f"CMakePresets.json needs CMake {needs}, found {found} at {chain.tool('cmake')}",
            fix="install a newer CMake, or lower the file's version in kernels/",
        )
