"""Give a proposed `./inv` command the manifest and target it is about, so that it can be pasted.

Most errors are raised where neither is known (the agent's, on the target). Both are put in where an
error or a report reaches the operator; a text that names them itself stays as it is.
"""

from __future__ import annotations

import re
import shlex

from deploy.agent.words import BundleError

# Which tasks take which flag; a test holds this to the tasks themselves.
ON_TARGET = frozenset(
    [
        "bench.accuracy",
        "bench.collect",
        "bench.run",
        "bench.status",
        "bench.stop",
        "check",
        "deploy",
        "doctor",
        "files",
        "hosts.status",
        "plan",
        "profile.run",
        "profile.status",
        "report",
        "restore",
        "serve.prove",
        "serve.start",
        "serve.status",
        "serve.stop",
        "show",
        "verify",
    ]
)
OF_MANIFEST = ON_TARGET | frozenset(
    [
        "bench.chunks",
        "build-image",
        "build-kernels",
        "bundle",
        "check-submission",
        "lock",
        "profile.summary",
        "render",
        "reproduce",
    ]
)
# These look at the submission itself; a target only makes them look there, too.
_TARGET_IS_EXTRA = frozenset({"plan", "show"})

# A command goes on to the end of its quotes, or of its clause where it has none.
_COMMAND = re.compile(r"\./inv (?P<task>[a-z]+(?:[.-][a-z]+)*)(?P<rest>[^`;,\n]*)")
_NAMES = re.compile(r"(?<!\S)(?:-n|--name)(?!\S)")
_TARGETS = re.compile(r"(?<!\S)(?:-t|--to|--group|--all|-g)(?!\S)")
_PLACEHOLDER = re.compile(r"(?<!\S)-n NAME(?!\S)")
_TARGET = re.compile(r"(?:local|ssh|container|image):.")


def is_target(text: str) -> bool:
    """True for what -t takes; a visit may have come of a file of evidence instead."""
    return _TARGET.match(text) is not None


def pasteable(text: str, name: str, target: str) -> str:
    """Return `text` with -n and -t in each command that takes them and says nothing of them.

    What is empty, or no target (a file of evidence), is not put in.
    """

    def completed(found: re.Match[str]) -> str:
        task, rest = found["task"], found["rest"]
        flags = ""
        if name and task in OF_MANIFEST:
            rest = _PLACEHOLDER.sub(lambda _: f"-n {shlex.quote(name)}", rest)
            if not _NAMES.search(rest):
                flags = f" -n {shlex.quote(name)}"
        wanted = task in ON_TARGET - _TARGET_IS_EXTRA and not _TARGETS.search(rest)
        if wanted and is_target(target):
            flags += f" -t {shlex.quote(target)}"
        return f"./inv {task}{flags}{rest}"

    return _COMMAND.sub(completed, text)


def addressed(err: BundleError, name: str, target: str) -> BundleError:
    """Complete the commands of an error in place, and return it."""
    err.why, err.fix = (pasteable(text, name, target) for text in (err.why, err.fix))
    return err
