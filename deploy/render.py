"""A template and one frozen view -> bytes, or the place where the template asks for too much.

`render` is this module's face. Templates hold text, not thought; whatever is undefined or None
stops it, and every shell word passes the `sh` filter. Nothing is run here, nothing is written.
"""

from __future__ import annotations

import dataclasses
import shlex
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import jinja2

from deploy.agent.words import printable
from deploy.errors import BadValues

_MARKUP = frozenset("&<>|`*_[]\\")  # what Markdown gives a meaning inside a table


class NotRenderable(ValueError):
    """A value that must not become text as it is."""


def sh(value: Any) -> str:
    """Return a value as one shell word, or a list of them as words; quotes only where needed.

    Raises NotRenderable for what has no one spelling as a word (None, truth values, mappings) and
    for text that no shell word can hold.
    """
    if isinstance(value, jinja2.Undefined):
        return str(value)  # raises, with the name that is missing
    if isinstance(value, list | tuple):
        return " ".join(sh(item) for item in value)
    text = str(_finished(value))
    if "\0" in text:
        raise NotRenderable(f"a shell word cannot hold NUL: {text!r}")
    return shlex.quote(text)


def cell(value: Any) -> str:
    """Return a text as one cell of a Markdown table that shows it literally."""
    if isinstance(value, jinja2.Undefined):
        return str(value)  # raises, with the name that is missing
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise NotRenderable(f"{type(value).__name__} is no text: {value!r}")
    marked = "".join(f"&#{ord(c)};" if c in _MARKUP else c for c in str(value))
    return "<br>".join(marked.splitlines())


def render(name: str, view: Any, folder: Path) -> bytes:
    """Return what the template `name` below `folder` says of `view`, a frozen dataclass.

    Line ends are the template's (LF or CRLF), and the last line ends exactly once.

    Raises BadValues, with template and line, for a missing or broken template, a name that the view
    does not have, and a value that is None.
    """
    templates = _Folder(folder)
    try:
        context = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
        environment = _environment(templates, templates.newline_of(name))
        text = environment.get_template(name).render(context)
    except jinja2.TemplateSyntaxError as err:
        raise _fault(f"{err.name or name}:{err.lineno}", str(err.message)) from err
    except jinja2.TemplateNotFound as err:
        raise _fault(name, f"there is no template {err.name}") from err
    except (jinja2.UndefinedError, NotRenderable) as err:
        raise _fault(_place(err, folder, name), str(err)) from err
    return (text.rstrip("\r\n") + environment.newline_sequence).encode()


class _Absent(jinja2.Undefined):
    """What None is inside a template: false, replaced by default(), and never text.

    A check of finished expressions alone would let `"--flag=" ~ none` through.
    """

    __slots__ = ()
    __str__ = __iter__ = __len__ = jinja2.Undefined._fail_with_undefined_error  # noqa: SLF001


class _Context(jinja2.runtime.Context):
    def resolve_or_missing(self, key: str) -> Any:
        return _present(super().resolve_or_missing(key), key)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return _present(super().call(*args, **kwargs), "what was called")


class _Environment(jinja2.Environment):
    context_class = _Context

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _present(super().getattr(obj, attribute), attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _present(super().getitem(obj, argument), str(argument))


def _present(value: Any, name: str) -> Any:
    if value is None:
        return _Absent(hint=f"{name!r} is None")
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple) and any(item is None for item in items):
        return jinja2.StrictUndefined(hint=f"{name!r} holds a None")
    return value


def _finished(value: Any) -> Any:
    if isinstance(value, jinja2.Undefined):
        return value  # raises by itself, with the name that is missing
    if isinstance(value, bool) or not isinstance(value, str | int | PurePath):
        raise NotRenderable(f"{type(value).__name__} is no text: {value!r}")
    return value


def _environment(templates: jinja2.BaseLoader, newline: str) -> jinja2.Environment:
    environment = _Environment(
        loader=templates,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        newline_sequence=newline,  # type: ignore[arg-type]
        finalize=_finished,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sh"] = sh
    environment.filters["cell"] = cell
    environment.tests["none"] = lambda value: value is None or isinstance(value, _Absent)
    return environment


class _Folder(jinja2.BaseLoader):
    """Templates below a folder. Jinja makes all line ends alike, so they must be alike before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        if self.newline_of(template) != environment.newline_sequence:
            raise jinja2.TemplateSyntaxError("its line ends differ from its parent's", 1, template)
        text = self._text(template)
        for const in environment.parse(text, template).find_all(jinja2.nodes.Const):
            if const.value is None:
                raise jinja2.TemplateSyntaxError("none has no text", const.lineno, template)
        return text, str(self.folder / template), lambda: True

    def newline_of(self, template: str) -> str:
        """Return LF or CRLF, whichever ends the lines of a template; mixed ones are refused."""
        text = self._text(template)
        bare = text.replace("\r\n", "")
        if "\r" in bare or ("\n" in bare and bare != text):
            first = next(i for i, line in enumerate(text.split("\n"), 1) if "\r" in line)
            raise jinja2.TemplateSyntaxError("it mixes LF and CRLF", first, template)
        return "\n" if bare == text else "\r\n"

    def _text(self, template: str) -> str:
        path = self.folder / template
        if PurePath(template).is_absolute() or ".." in PurePath(template).parts:
            raise jinja2.TemplateNotFound(template)
        try:
            return path.read_bytes().decode()
        except OSError as err:
            raise jinja2.TemplateNotFound(template) from err
        except UnicodeDecodeError as err:
            raise jinja2.TemplateSyntaxError("it is not UTF-8", 1, template) from err


def _place(err: BaseException, folder: Path, name: str) -> str:
    """Return "template:line" and the line's text; Jinja puts both into the traceback."""
    frames = [
        f for f in traceback.extract_tb(err.__traceback__) if f.filename.startswith(f"{folder}/")
    ]
    if not frames:
        return name
    frame = frames[-1]
    template = frame.filename[len(str(folder)) + 1 :]
    lines = Path(frame.filename).read_text(encoding="utf-8").splitlines()
    line = frame.lineno or 1
    source = lines[line - 1].strip() if line <= len(lines) else ""
    return f"{template}:{line}: in `{source}`"


def _fault(place: str, why: str) -> BadValues:
    return BadValues(
        f"cannot render {printable(place)}",
        why=printable(why),
        fix="give the view that value, or write an explicit default() into the template",
    )
