"""Ask the service's interpreter, started as the service would be, where it imports from.

It is asked twice: in the folder the service is launched in, because ``python -m`` puts that folder
first, and in a fresh empty folder. It asks the finders for the top package and for every module of
the plan, and imports none of them: importing vLLM needs torch, a device, and many seconds.

One process answers both: its sys.path begins with the current folder by name ("", resolved anew at
every import), so a change of folder asks the second question at half the cost. It starts in the
launch folder, where the answer must be exact even for a relative PYTHONPATH.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .child import Child
from .tree import TreeReader
from .words import Unfit, printable

MARK = b"\n\x00dcu-bundle:origin\x00\n"

_ASK = r"""
import importlib.util, json, os, sys
from importlib.machinery import SourceFileLoader
def name(thing):
    return getattr(thing, "__name__", type(thing).__name__)
def told(loader):
    return "%s of %s" % (name(loader), getattr(loader, "__module__", None) or "nobody")
def ask(package):
    try:
        spec = importlib.util.find_spec(package)
    except Exception as err:
        return {"error": "%s: %s" % (type(err).__name__, err)}
    if spec is None:
        return {"error": "no finder knows it"}
    places = spec.submodule_search_locations
    loader = spec.loader
    return {"origin": spec.origin, "places": None if places is None else [str(p) for p in places],
            "loader": None if loader is None else told(loader),
            "plain": type(loader) is SourceFileLoader}
# A module is asked for as an import would: folder by folder, each in the places of the one above.
class Elsewhere(Exception):
    pass
def found(full, places):
    if full in sys.modules:
        spec = getattr(sys.modules[full], "__spec__", None)
        if spec is None:
            raise Elsewhere("it was put into sys.modules before anybody imported it")
        return spec
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(full, places)
        if spec is not None:
            return spec
    raise Elsewhere("no finder knows " + full)
def places_of(full, known, added):
    if full not in known:
        above = full.rpartition(".")[0]
        spec = found(full, places_of(above, known, added) if above else None)
        # One that was loaded has its own say; of a namespace, the list itself asks the one above.
        places = getattr(sys.modules.get(full), "__path__", spec.submodule_search_locations)
        if places is None:
            known[full] = Elsewhere("%s is %s, which is no package" % (full, spec.origin))
        else:
            known[full] = [str(p) for p in getattr(places, "_path", places)]
            if full not in sys.modules:
                # What looks for a module below finds the one above loaded, namespaces need it.
                sys.modules[full] = added[full] = type(sys)(full)
                added[full].__path__ = known[full]
                added[full].__spec__ = spec
    if isinstance(known[full], Elsewhere):
        raise known[full]
    return known[full]
def same(one, other):
    try:
        return one == other or os.path.samefile(one, other)
    except (OSError, TypeError, ValueError):
        return False
def strange(path, known, added):
    parts = path[:-len(".py")].split("/")
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or "." in "".join(parts):
        return ""  # nothing that an import statement can name
    full = ".".join(parts)
    try:
        above = full.rpartition(".")[0]
        spec = found(full, places_of(above, known, added) if above else None)
        if not same(spec.origin, visible + "/" + path):
            return "%s is imported in its place" % (spec.origin or told(spec.loader))
        if type(spec.loader) is not SourceFileLoader:
            return "%s gives its code, which need not be that of the file" % told(spec.loader)
    except Elsewhere as err:
        return str(err)
    except Exception as err:
        return "a finder failed: %s: %s" % (type(err).__name__, err)
    return ""
def strangers():
    known, added = {}, {}
    whys = [(number, strange(path, known, added)) for number, path in enumerate(modules)]
    for full in added:
        sys.modules.pop(full, None)
    return [(number, why) for number, why in whys if why]
site = sys.modules.get("site")
def answer(package):
    said = {"cwd": os.getcwd(), "path": list(sys.path), "spec": ask(package)}
    # Where the package itself comes from elsewhere, so does all below it: that is told once.
    if same(said["spec"].get("origin"), "%s/%s/__init__.py" % (visible, package)):
        said["strangers"] = strangers()
    return said
answers = {}
package, empty, launch, visible = sys.argv[1:5]
modules = sys.argv[5:]
if launch:
    answers["launch"] = answer(package)
    os.chdir(empty)
    sys.path_importer_cache.clear()
answers["empty"] = answer(package)
python = {
    "version": "%d.%d.%d" % sys.version_info[:3], "executable": sys.executable,
    "tag": sys.implementation.cache_tag, "magic": importlib.util.MAGIC_NUMBER.hex(),
    "finders": [[name(finder), getattr(finder, "__module__", "")] for finder in sys.meta_path],
    "customize": {n: getattr(sys.modules[n], "__file__", None) or ""
                  for n in ("sitecustomize", "usercustomize") if n in sys.modules},
    "user_site": getattr(site, "USER_SITE", None) if getattr(site, "ENABLE_USER_SITE", 0) else None,
    "pythonpath": os.environ.get("PYTHONPATH", ""),
    "optimize": sys.flags.optimize,
    "pycache_prefix": sys.pycache_prefix, "writes_bytecode": not sys.dont_write_bytecode,
}
sys.stdout.flush()
out = getattr(sys.stdout, "buffer", sys.stdout)
out.write(MARK + json.dumps([python, answers]).encode() + b"\n")
out.flush()
"""

# What sourcing prints is of no interest; what it exports is. It is sourced in a function, whose
# words it may set as it likes, and the folder is entered again after it, as the service does it.
_SHELL = """
load() { . "$1" >/dev/null || exit 98; }
cd "$1" || exit 97
[ -z "$2" ] || load "$2"
cd "$1" || exit 97
shift 2
exec "$@"
"""
_ENDS = {97: "the folder it starts in cannot be entered", 98: "env_script failed"}


class Probe:
    """The two questions, asked at once; `finish` gives the answers."""

    def __init__(
        self,
        tree: TreeReader,
        *,
        package: str,
        python: str,
        env_script: str = "",
        launch_dir: str = "",
        env: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self._modules = tuple(modules)
        self._empty = _fresh_folder()
        script = tree.from_root(env_script) if env_script else ""
        launch = tree.from_root(launch_dir) if launch_dir else ""
        self._missing = launch if launch and not os.path.isdir(launch) else ""
        launch = "" if self._missing else launch
        shell = ("/bin/sh", "-c", _SHELL, "sh", launch or self._empty, script)
        ask = (python, "-c", f"MARK = {MARK!r}\n{_ASK}", package, self._empty, launch)
        below = (tree.visible(""), *self._modules)
        self._child = Child((*shell, *ask, *below), {**os.environ, **(env or {})})

    def finish(self, timeout: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the interpreter is, and place ("empty", "launch") -> answer.

        Raises Unfit when it does not answer.
        """
        try:
            status, out, err = self._child.finish(timeout)
        except TimeoutError as late:
            raise self._silent(str(late)) from late
        finally:
            self.cancel()
        _, mark, answer = out.rpartition(MARK)
        if not mark:
            last = err.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise self._silent(_ENDS.get(status, f"it ended with {status}") + f": {last[0]}")
        python, answers = self._understood(answer)
        if self._missing:
            answers["launch"] = {"missing": self._missing}
        return python, answers

    def _understood(self, answer: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        # One line: what comes after it was printed by somebody at the interpreter's end.
        try:
            python, answers = json.loads(answer.partition(b"\n")[0])
            for said in answers.values():
                # By number: the interpreter may write names in another encoding than ours.
                said["strangers"] = {self._modules[n]: why for n, why in said.get("strangers", ())}
            return dict(python), dict(answers)
        except (ValueError, TypeError, AttributeError, IndexError) as err:
            raise self._silent(f"its answer cannot be read: {err}") from err

    def cancel(self) -> None:
        """End what still runs and remove the empty folder. May be called again."""
        self._child.kill()
        if self._empty:
            _remove(self._empty)
            self._empty = ""

    def _silent(self, why: str) -> Unfit:
        return Unfit(
            "the service's interpreter does not answer",
            why=printable(why),
            fix="run env_script and base.python by hand on the target",
        )


def _fresh_folder() -> str:
    # Below the temp folder but never that folder itself: it may hold a vllm/ of somebody's.
    # A container with a read-only root still has its shared memory.
    places = ["/tmp", "/var/tmp", "/dev/shm"]  # noqa: S108
    while places:
        name = f"{places[0]}/dcu-bundle-{os.getpid()}-{os.urandom(6).hex()}"
        try:
            os.mkdir(name, 0o700)
        except FileExistsError:
            continue
        except OSError:
            places.pop(0)
            continue
        return name
    raise Unfit(
        "there is no place for an empty folder",
        why="neither /tmp nor /var/tmp nor /dev/shm can be written",
        fix="make one of them writable; the import is proven from a folder that holds nothing",
    )


def _remove(folder: str) -> None:
    """Remove the empty folder, and what env_script or the interpreter left in it."""
    try:
        os.rmdir(folder)
    except OSError:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
