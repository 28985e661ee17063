"""Where the commands of a build run: on this machine, or in a container that sees the same folders.

A command is an argument tuple with an environment of its own; what it prints goes to a log file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from deploy.errors import BadValues, BundleError, Unfit

Env = Mapping[str, str]


class Runner(Protocol):
    """Runs one command at a time. `where` is "local", or names the image."""

    where: str

    def hold(self, lock: int) -> None:
        """Let every command hold an open lock file: killed alone, we leave compilers behind."""

    def run(self, argv: tuple[str, ...], *, env: Env, cwd: Path, log: Path, seconds: int) -> int:
        """Run to the end, appending all output to `log`; return the exit code."""

    def ask(self, argv: tuple[str, ...], *, env: Env, cwd: Path, seconds: int = 120) -> str:
        """Return what a small command prints, errors included; raise Unfit if it fails."""


class Local:
    """Runs commands here, each in a session of its own so that ^C ends its children too."""

    where = "local"

    def __init__(self) -> None:
        self._held: tuple[int, ...] = ()

    def hold(self, lock: int) -> None:
        self._held = (lock,)

    def run(self, argv: tuple[str, ...], *, env: Env, cwd: Path, log: Path, seconds: int) -> int:
        with log.open("ab") as out:
            process = self._start(argv, env, cwd, out.fileno(), subprocess.STDOUT)
            try:
                return process.wait(timeout=seconds)
            except subprocess.TimeoutExpired as err:
                raise BundleError(
                    f"{Path(argv[0]).name} did not end within {seconds} s",
                    why=f"its output so far is in {log}",
                    fix="look there for the command that hangs",
                    exit=BadValues.exit,
                ) from err
            finally:
                _end(process)

    def ask(self, argv: tuple[str, ...], *, env: Env, cwd: Path, seconds: int = 120) -> str:
        process = self._start(argv, env, cwd, subprocess.PIPE, subprocess.STDOUT)
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            raise failed(argv, f"it did not end within {seconds} s") from late
        finally:
            _end(process)
        if process.returncode != 0:
            raise failed(argv, out.decode("utf-8", "replace"))
        return str(out.decode("utf-8", "replace"))

    def _start(
        self, argv: tuple[str, ...], env: Env, cwd: Path, out: int, err: int
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                pass_fds=self._held,
            )
        except OSError as error:
            raise failed(argv, str(error)) from error


def failed(argv: tuple[str, ...], said: str) -> Unfit:
    last = [line for line in said.strip().splitlines() if line.strip()][-1:] or ["it said nothing"]
    return Unfit(
        f"{argv[0]} could not be run",
        why=last[0].strip(),
        fix="install it, or correct base.python and base.env_script in the manifest",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a command that still runs, with its children; ninja then drops half-made outputs."""
    for number, patience in ((signal.SIGINT, 5.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        until = time.monotonic() + patience
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
