"""What an operator can ask for: `./inv --list`, and `./inv --help TASK`.

A task is a few lines: look up, call, report. The deployment's own tasks stand in this file; those
of a namespace (serve.start) stand in deploy/tasks/NAMESPACE.py and are named in `_NAMESPACES`.
Import nothing heavy at the top: every call, `--list` included, pays for it.
"""

from __future__ import annotations

from types import ModuleType

from invoke import Collection, Task

from deploy.tasks.develop import bench_self, lint, test  # noqa: F401  gathered below

_NAMESPACES: tuple[ModuleType, ...] = ()


# --- the deployment's tasks go here ---


namespace = Collection(*(thing for thing in tuple(globals().values()) if isinstance(thing, Task)))
for _module in _NAMESPACES:
    namespace.add_collection(Collection.from_module(_module))
