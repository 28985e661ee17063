"""Finds the agent's modules in its bundle, and compiles each of them once.

Python's own importer of zips compiles every module twice, the first time only to learn the name
of its file; that was a third of the time of a verify.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from zipimport import zipimporter


class Sources:
    """A finder and loader in one, in front of all others. It knows `agent.*` only."""

    def __init__(self, bundle: zipimporter) -> None:
        self._bundle = bundle

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("agent."):
            return None
        file = os.path.join(self._bundle.archive, _member(name))
        spec = ModuleSpec(name, self, origin=file)  # type: ignore[arg-type]
        spec.has_location = True
        return spec

    def create_module(self, _spec: ModuleSpec) -> None:
        """An ordinary module will do."""

    def exec_module(self, module: ModuleType) -> None:
        text = self.get_source(module.__name__)
        code = compile(text, str(module.__file__), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102 - this is what an importer does

    def get_source(self, name: str) -> str:
        """Return a module's text; a traceback asks for it too. Raises ImportError."""
        try:
            return self._bundle.get_data(_member(name)).decode("utf-8")
        except OSError as err:
            raise ModuleNotFoundError(f"the bundle has no module {name}", name=name) from err


def _member(name: str) -> str:
    return name.replace(".", "/") + ".py"
