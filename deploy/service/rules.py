"""What the rules forbid of the words that start a service, in every spelling that its parser takes.

`forbidden` and `unseen` are this module's face. They know the server's flags, and run nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

_SPECULATIVE = "speculative decoding"
_QUANTISED = "quantised weights"
_SCHEDULER = "another scheduler"
# Flags of the server. Their beginnings are taken, too: of one that fits several flags the server
# itself wants to know more, and does not start.
_FLAGS = {
    "--speculative-config": _SPECULATIVE,
    "--quantization": _QUANTISED,
    "--scheduler-cls": _SCHEDULER,
    "--scheduling-policy": _SCHEDULER,
}
# What other versions and forks call the same.
_FAMILIES = {
    "--speculative": _SPECULATIVE,
    "--spec-decod": _SPECULATIVE,
    "--num-speculative": _SPECULATIVE,
    "--draft-model": _SPECULATIVE,
    "--quantization": _QUANTISED,
    "--override-quantization": _QUANTISED,
}
# Flags that are forbidden with some values only.
_VALUES = {
    "--load-format": re.compile(r"gguf|bitsandbytes", re.IGNORECASE),
    "--hf-overrides": re.compile(r".*quantization", re.DOTALL),
}
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")


class _Flag(NamedTuple):
    word: str  # as it was written
    name: str  # as the server's help spells it, or a beginning of that
    value: str


def forbidden(command: Sequence[str], serve: Sequence[str]) -> Iterator[str]:
    """Yield each flag that the rules do not allow, and why."""
    for flag in _flags(_words(command, serve)):
        if what := _fault(flag):
            yield f"{flag.word}: {what} is not allowed"


def unseen(command: Sequence[str], serve: Sequence[str]) -> str:
    """Say which options nobody can see from the words alone; "" where all of them stand there."""
    for flag in _flags(_words(command, serve)):
        if flag.name == "--config":
            return f"options in a file ({flag.word} {flag.value})"
    if any(map(_is_server, command)) and not any(re.search(r"[\s$`]", word) for word in command):
        return ""
    return f"what `{shlex.join(command)}` adds by itself"


def assigned(command: Sequence[str]) -> Iterator[str]:
    """Yield the variables that the command sets for the server by itself (`env NAME=VALUE`)."""
    for word in _split(command):
        if match := _ASSIGNED.match(word):
            yield match[1]


def _words(command: Sequence[str], serve: Sequence[str]) -> list[str]:
    """What the server reads: a `-q` before it is its interpreter's."""
    words = list(_split(command))
    start = next((at for at, word in enumerate(words) if _is_server(word)), 0)
    return [*words[start:], *serve]


def _is_server(word: str) -> bool:
    name = PurePosixPath(word).name
    return name == "vllm" or name.startswith("vllm.")


def _split(command: Sequence[str]) -> Iterator[str]:
    """The words of a command, and those inside a word that a shell is to read."""
    for word in command:
        try:
            yield from shlex.split(word) if re.search(r"\s", word) else [word]
        except ValueError:  # a quote without its end
            yield from word.split()


def _flags(words: list[str]) -> Iterator[_Flag]:
    for word, following in zip(words, [*words[1:], ""]):
        if word.startswith("-q"):  # its value may stand right behind it
            yield _Flag(word, "--quantization", word[2:] or following)
        elif word.startswith("--") and word != "--":
            head, equals, value = word.partition("=")
            # `--flag.key value` is a JSON value's key.
            name, _, key = head.partition(".")
            told = value if equals else following
            yield _Flag(head, name.replace("_", "-"), f"{key}={told}" if key else told)


def _fault(flag: _Flag) -> str:
    for name, value in _VALUES.items():
        if name.startswith(flag.name) and value.match(flag.value):
            return _QUANTISED
    for name, what in _FLAGS.items():
        if name.startswith(flag.name):
            return what
    for name, what in _FAMILIES.items():
        if flag.name.startswith(name):
            return what
    return ""
