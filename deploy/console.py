"""Where errors become text and exit codes, and how a task speaks: the one wrapper round all tasks.

Data goes to stdout, progress and errors to stderr. A task that this module wraps may return an exit
code; None is 0. What is no `BundleError` is our bug and crashes with its traceback (exit 1).
"""

from __future__ import annotations

import atexit
import errno
import functools
import inspect
import io
import json as jsonlib
import os
import re
import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import invoke
import invoke.main

from deploy.agent.words import Interrupted, printable
from deploy.commands import addressed
from deploy.errors import BadValues, BundleError, Exit, NeedsPerson, Unfit
from deploy.layout import HERE

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["say", "show_json", "task"]

_INTERRUPTED = Interrupted("interrupted", why="a person or a signal ended it", fix="ask again")
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_UNKNOWN = re.compile("No idea what ['\"](.*)['\"] is!", re.DOTALL)  # Invoke's parser, of a word
_PIPE_CLOSED = 141  # what a shell shows for a program that SIGPIPE ended

# Invoke's own letters are the first that a task has free: -w or -o would mean something else in
# each. One letter, one flag; a flag that is not named here has none.
_LETTERS = {
    "name": "n",
    "to": "t",
    "json": "j",
    "alias": "a",
    "follow": "f",
    "group": "g",
    "worktree": "w",
    "yes": "y",
}

# One meaning a flag, in every task.
_FLAGS = {
    "name": "the manifest: manifests/NAME.yaml (default: $DCU_MANIFEST, the only one, or demo)",
    "to": "where: local:ROOT, ssh:ALIAS, container:ID or image:REF; several by comma",
    "json": "print one JSON value on stdout instead of text",
}


class _Flag(invoke.Argument):
    """A flag that takes a value: one of the wrong kind is a bad value, and none of our bugs."""

    def set_value(self, value: Any, cast: bool = True) -> None:
        # An unset variable of a script (`-t "$UNSET"`) must not become the default, and success.
        if not str(value).strip(", \t\r\n"):
            self._refuse(f"its value is empty: {value!r}", "give one, or leave the flag out")
        try:
            super().set_value(value, cast)
        except ValueError:
            kind = "a whole number" if self.kind is int else "a number"
            self._refuse(f"it takes {kind}, found {value!r}", "give one")

    def _refuse(self, why: str, fix: str) -> NoReturn:
        bad = BadValues(
            f"--{self.names[0]} cannot be used",
            why=why,
            fix=f"{fix}; ./inv --help TASK shows what each flag takes",
        )
        raise _ended(bad) from None

    def __repr__(self) -> str:
        """Return how the flag is typed: Invoke's parser puts this into its errors."""
        return f"--{self.names[0]}"


class _Task(invoke.Task[Any]):
    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[invoke.Argument]:
        every = super().get_arguments(ignore_unknown_help)
        for flag in every:
            flag.names = (*flag.names, *_LETTERS.get(flag.names[0], ""))
        return [_checked(flag) if flag.takes_value else flag for flag in every]


class _Program(invoke.Program):
    """Invoke's program, which says in three lines what it does not understand."""

    def parse_tasks(self) -> None:
        self._told(super().parse_tasks)

    def parse_cleanup(self) -> None:
        self._told(super().parse_cleanup)

    def _told(self, step: Callable[[], None]) -> None:
        try:
            step()
        except invoke.ParseError as err:
            context = err.context
            task = str(context.name) if context is not None and context.name else ""
            flags = sorted((context or self.initial_context).flags)
            tasks = sorted(self.collection.task_names)
            raise _ended(_misunderstood(str(err), task, flags, tasks)) from None


# The program that is at work, by ./inv and by plain inv: it has just loaded us, and parses next.
invoke.main.program.__class__ = _Program


def _misunderstood(said: str, task: str, flags: list[str], tasks: list[str]) -> BundleError:
    """Return Invoke's complaint about the words of a call as what, why and fix."""
    from deploy.fields import did_you_mean

    unknown = _UNKNOWN.fullmatch(said)
    word = unknown[1] if unknown else ""
    if not unknown:
        why = re.sub("^Flag (.*) needed value and", r"\1 takes a value and", said).rstrip("!")
    elif word.startswith("-"):
        why = f"{task or './inv'} has no flag {word}{did_you_mean(word, flags)}"
    elif task:
        why = f"{word!r} is no task, and {task} takes nothing but flags{did_you_mean(word, tasks)}"
    else:
        why = f"there is no task {word!r}{did_you_mean(word, tasks)}"
    shown = f"./inv --help {task} shows what it takes" if task else "./inv --list shows the tasks"
    return BundleError("cannot understand the call", why=why, fix=shown, exit=Exit.BUG)


def _ended(err: BundleError) -> invoke.Exit:
    """Report what is wrong with the words of a call, and return what ends it.

    Invoke parses before any task runs, and passes on nothing but its own exceptions.
    """
    as_json = not {"-j", "--json"}.isdisjoint(sys.argv)
    return invoke.Exit(code=_report(err, as_json=as_json))


def _checked(flag: invoke.Argument) -> _Flag:
    kept = ("names", "kind", "default", "help", "optional", "attr_name")
    return _Flag(**{key: getattr(flag, key) for key in kept})


def say(line: str) -> None:
    """Print one line of progress on stderr."""
    _complain([line])


def _complain(lines: list[str]) -> None:
    try:
        print(*map(printable, lines), sep="\n", file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        # A full disk below `2>log` must not end a deploy half way; the answer goes to stdout.
        _lead_nowhere(sys.stderr)


def show_json(value: Any) -> None:
    """Print `value` on stdout as JSON, keys sorted, in ASCII (which any terminal can show)."""
    print(jsonlib.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def task(
    *, example: str, help: Mapping[str, str] | None = None, **options: Any
) -> Callable[[Callable[..., int | None]], Any]:
    """Make a function an Invoke task whose errors become text and an exit code.

    `example` is a whole command line; it ends the task's --help. It works as it stands after
    `./inv reproduce`, but for what only the reader has: words in capitals, which are then named.
    `help` holds a line for each flag but --name, --to and --json, which mean the same everywhere.
    `options` are Invoke's own.
    """

    def wrap(body: Callable[..., int | None]) -> Any:
        @functools.wraps(body)
        def run(context: invoke.Context, **flags: Any) -> None:
            act = functools.partial(_addressing, functools.partial(body, context, **flags))
            code = _outcome(act, as_json=bool(flags.get("json")))
            if code:
                raise invoke.Exit(code=code)

        run.__doc__ = f"{inspect.cleandoc(body.__doc__ or '')}\n\nExample: {example}{_own(example)}"
        flags = inspect.signature(body).parameters
        known = {k: v for k, v in _FLAGS.items() if k in flags}
        told = {k: _with_kind(flags[k], v) for k, v in {**known, **(help or {})}.items()}
        return invoke.task(run, help=told, klass=_Task, auto_shortflags=False, **options)

    return wrap


def _addressing(body: functools.partial[int | None]) -> int | None:
    """Run a task; what an error of it proposes to type is about the same manifest and targets."""
    try:
        return body()
    except BundleError as err:
        asked = body.keywords
        addressed(err, str(asked.get("name", "")), str(asked.get("to", "")))
        raise


def _own(example: str) -> str:
    """A line that names the words of an example which stand for something of the reader's own."""
    words = dict.fromkeys(re.findall(r"\b[A-Z]{2,}\b", example))
    return f"\n{', '.join(words)}: yours" if words else ""


def _with_kind(flag: inspect.Parameter, help: str) -> str:
    """Say that a flag takes a number where Invoke's --help shows it like one that takes nothing."""
    return f"NUMBER: {help}" if isinstance(flag.default, float) else help


def _outcome(act: Callable[[], int | None], *, as_json: bool) -> int:
    _soften(sys.stdout, sys.stderr)
    # A umask that takes the owner's own rights would lock the next call out of what this one makes.
    os.umask(os.umask(0o077) & 0o077)
    try:
        code = _attempt(act, as_json=as_json)
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        # A reader like `head` may leave early. Any other broken pipe is a child's, and our bug.
        if not _reader_left():
            raise
        return _PIPE_CLOSED
    return _unanswered() or code


def _unusable(err: OSError) -> BundleError | None:
    """Return what an error of the system says of this machine; None: it is our bug.

    The machine is then as unfit as a target would be (exit 3), as where `inv` cannot make .venv.
    Everything is made below out/; elsewhere a file that lacks is no fault of the machine.
    """
    path = str(err.filename or "")
    if err.errno not in _DENIED and not Path(path).is_relative_to(HERE.out):
        return None
    return Unfit(
        f"cannot use {path or 'a disk of this machine'}",
        why=err.strerror or str(err),
        fix="let it be there, be writable and have room (`./inv gc` shows what out/ holds), then"
        " ask again",
    )


def _attempt(act: Callable[[], int | None], *, as_json: bool) -> int:
    try:
        return int(act() or 0)
    except BundleError as err:
        return _report(err, as_json=as_json)
    except BrokenPipeError:
        raise
    except OSError as err:
        if fault := _unusable(err):
            return _report(fault, as_json=as_json)
        raise
    except KeyboardInterrupt:
        say("interrupted")
        if as_json:
            show_json({"schema": "error/1", "error": _INTERRUPTED.to_json()})
        return int(Exit.INTERRUPTED)


def _report(err: BundleError, *, as_json: bool) -> int:
    _complain(str(err).splitlines())
    if as_json:
        show_json({"schema": "error/1", "error": err.to_json()})
    return int(err.exit)


def _soften(*streams: TextIO) -> None:
    """Let a terminal that lacks a character show its escape instead of ending the task."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reader_left() -> bool:
    """True when nobody is at the other end of stdout or stderr; it then leads to nowhere."""
    left = False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            left = True
            _lead_nowhere(stream)
    return left


def _lead_nowhere(stream: TextIO) -> None:
    # The interpreter flushes once more at its end; that must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Patient(io.FileIO):
    """Stdout that notes what it could not write: a full disk must not end a deploy half way."""

    lost: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as err:
            self.lost = err
            return memoryview(data).nbytes


def _patient(stream: TextIO) -> TextIO:
    # Not a stream that a test or a caller put there. Nor stderr: a signal between the write and its
    # note would have a line written twice, which a progress line may not be.
    if not isinstance(stream, io.TextIOWrapper) or stream is not sys.__stdout__:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Patient(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _unanswered() -> int:
    """Say that stdout did not take all of the answer, and return the exit code for it; else 0.

    Whatever the task did, it did: neither "done" nor "a difference" may be what a script sees, and
    nothing was rolled back. So a person has to look (exit 8).
    """
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Patient) or raw.lost is None:
        return 0
    why, raw.lost = f"writing to stdout: {raw.lost.strerror}", None
    fix = "make room where stdout leads, then ask again; `./inv verify` says what is true now"
    return _report(NeedsPerson("the answer could not be written", why=why, fix=fix), as_json=False)


@atexit.register
def _end() -> None:
    """Say of what Invoke itself printed (--list, --help) what is said of a task's answer."""
    try:
        if sys.stdout:
            sys.stdout.flush()
        code = _unanswered()
    except BrokenPipeError:
        code = _PIPE_CLOSED if _reader_left() else 1
    if code:
        sys.stderr.flush()
        os._exit(code)


sys.stdout = _patient(sys.stdout)
