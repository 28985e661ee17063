"""Import each extension as the service would, and ask what it registered.

`import vllm` passes over a missing or broken extension in silence, so the extension itself is
imported, every symbol bound at once, in a child of the service's interpreter. What can be wrong has
a state of its own: the cure differs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .child import Child
from .plan import Extension
from .probe import _ENDS, _SHELL, _fresh_folder
from .tree import TreeReader
from .words import printable

MARK = b"\n\x00dcu-bundle:ops\x00\n"
SECONDS = 600.0  # importing torch from a cold shared disk was seen to take minutes

# The child. It answers before it imports anything, so that a file whose loading ends the process is
# still named; and it notes which ops were there before the extension is loaded, whoever imports it,
# and which right after, so that somebody else's do not count.
_ASK = r"""
import hashlib, importlib, importlib.util, json, os, sys
def ask(module, namespace, ops):
    said = {"origin": "", "found": {}, "foreign": {}, "elsewhere": {}, "torch": ""}
    try:
        import torch
        said["torch"] = getattr(torch, "__version__", "")
    except Exception as err:
        return dict(said, state="torch does not import", text=text(err))
    there = lambda: {op for op in ops if schema(torch, namespace, op) is not None}
    watch = Watch(module, there)
    if module in sys.modules:  # as torch or the interpreter started: nothing can be told apart
        watch.before = there()
    sys.meta_path.insert(0, watch)  # the package itself may load it
    try:
        spec = importlib.util.find_spec(module)
    except Exception as err:
        return dict(said, state="package does not import", text=text(err))
    if spec is None or not spec.origin:
        return dict(said, state="extension missing", text="no file is found for " + module)
    said["origin"] = spec.origin
    try:
        with open(spec.origin, "rb") as file:
            said["sha256"] = hashlib.sha256(file.read()).hexdigest()
            info = os.fstat(file.fileno())
            said["device"], said["inode"] = info.st_dev, info.st_ino
    except OSError as err:
        return dict(said, state="extension missing", text=text(err))
    tell(dict(said, state="loading", text=""))
    try:
        importlib.import_module(module)
    except Exception as err:
        return dict(said, state="does not load", text=text(err))
    for op in ops:
        found = schema(torch, namespace, op)
        if found is not None:
            said["found"][op] = found
        else:
            said["elsewhere"][op] = places(torch, op)
    for op in there():
        if op in watch.before:
            said["foreign"][op] = "before"
        elif op not in watch.after:
            said["foreign"][op] = "after"
    return dict(said, state="loaded", text="")
class Watch:
    def __init__(self, module, there):
        self.module, self.there, self.before, self.after = module, there, set(), set()
    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        if hasattr(getattr(spec, "loader", None), "create_module"):
            self.wrap(spec.loader)
        return spec
    def wrap(self, loader):
        create, run = loader.create_module, loader.exec_module
        def created(spec):
            self.before = self.there()
            sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL)
            return create(spec)
        def ran(module):
            run(module)
            self.after = self.there()
        loader.create_module, loader.exec_module = created, ran
def text(err):
    return "%s: %s" % (type(err).__name__, err)
def schema(torch, namespace, op):
    packet = getattr(getattr(torch.ops, namespace, None), op, None)
    if packet is None:
        return None
    names = packet.overloads() if hasattr(packet, "overloads") else []
    overloads = [getattr(packet, name) for name in names]
    return " | ".join(sorted(str(getattr(o, "_schema", "")) for o in overloads))
def places(torch, op):
    names = getattr(getattr(torch, "_C", None), "_dispatch_get_all_op_names", lambda: [])()
    full = {name.split(".")[0] for name in names}
    return sorted(name for name in full if name.rsplit("::", 1)[-1] == op)
def tell(answer):
    sys.stdout.flush()
    out = getattr(sys.stdout, "buffer", sys.stdout)
    out.write(MARK + json.dumps(answer).encode() + b"\n")
    out.flush()
tell(ask(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
os._exit(0)  # what a device runtime does at exit is none of our business
"""


class OpsProbe:
    """One child per extension, started at once; `finish` gives an answer for each."""

    def __init__(
        self,
        tree: TreeReader,
        extensions: Sequence[Extension],
        *,
        python: str,
        env_script: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._tree, self._extensions = tree, tuple(extensions)
        self._empty = _fresh_folder()
        script = tree.from_root(env_script) if env_script else ""
        self._children = [
            Child(
                ("/bin/sh", "-c", _SHELL, "sh", self._empty, script, *_command(python, extension)),
                {**os.environ, **(env or {})},
            )
            for extension in self._extensions
        ]

    def finish(self, timeout: float = SECONDS) -> list[dict[str, Any]]:
        """Return one answer an extension, in their order.

        Each has `module`, `namespace`, `state` ("ok" or what is wrong), `why`, `origin`, `sha256`,
        `device` and `inode` of the file that an import takes, `expected` (where the site has it),
        `schemas` and the version of `torch`.
        """
        try:
            pairs = zip(self._extensions, list(self._children))
            return [self._answer(one, child, timeout) for one, child in pairs]
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End what still runs and remove the empty folder."""
        for child in self._children:
            child.kill()
        self._children = []
        if self._empty:
            os.rmdir(self._empty)
            self._empty = ""

    def _answer(self, extension: Extension, child: Child, timeout: float) -> dict[str, Any]:
        said: dict[str, Any] = {"origin": "", "torch": ""}
        try:
            status, out, err = child.finish(timeout)
        except TimeoutError as late:
            said |= {"state": "does not answer", "text": str(late)}
        else:
            _, mark, answer = out.rpartition(MARK)
            said |= json.loads(answer.splitlines()[0]) if mark else {"state": "loading"}
            if said["state"] == "loading":
                said |= _ended(status, err)
        return judge(extension, said, self._expected(extension, said["origin"]))

    def _expected(self, extension: Extension, origin: str) -> str:
        """Return the path that the site gives the module, under the name found (or .abi3.so)."""
        folder, _, name = extension.module.replace(".", "/").rpartition("/")
        suffix = os.path.basename(origin).partition(".")[2] if origin else "abi3.so"
        return self._tree.visible(f"{folder}/{name}.{suffix}" if folder else f"{name}.{suffix}")


def judge(extension: Extension, said: Mapping[str, Any], expected: str) -> dict[str, Any]:
    """Turn what a child said into the answer for one extension."""
    state, why = _judged(extension, said)
    same = bool(said["origin"]) and _same_file(said["origin"], expected)
    return {
        "module": extension.module,
        "namespace": extension.namespace,
        "state": state,
        "why": printable(why),
        "origin": expected if same else said["origin"],
        "expected": expected,
        "sha256": said.get("sha256", ""),
        "device": said.get("device"),
        "inode": said.get("inode"),
        "schemas": dict(said.get("found", {})),
        "torch": said["torch"],
    }


def _judged(extension: Extension, said: Mapping[str, Any]) -> tuple[str, str]:
    if said["state"] == "does not load":
        return _load_failure(said)
    if said["state"] != "loaded":
        return str(said["state"]), str(said["text"])
    found = said["found"]
    if missing := sorted(op for op in extension.ops if op not in found):
        return "op missing", _where_else(extension, said, missing)
    if foreign := said["foreign"]:
        told = (f"{op} was registered {when}" for op, when in sorted(foreign.items()))
        return "op from elsewhere", f"{', '.join(told)} {said['origin']} was loaded"
    for op, wanted in sorted(extension.ops.items()):
        if wanted and _plain(wanted) not in map(_plain, found[op].split(" | ")):
            return "other schema", f"{op} is {found[op]}, wanted {wanted}"
    return "ok", ""


def _load_failure(said: Mapping[str, Any]) -> tuple[str, str]:
    text, where = str(said["text"]), f" ({said['origin']}, torch here is {said['torch']})"
    if symbol := re.search(r"undefined symbol: (\S+)", text):
        return "undefined symbol", f"{symbol[1]}: it was built for another torch{where}"
    if library := re.search(r"(\S+): cannot open shared object file", text):
        return "library missing", f"{library[1]} is in no library path that env_script sets{where}"
    if "TORCH_LIBRARY" in text or "multiple times" in text or "already" in text:
        return "namespace clash", " ".join(text.split())[:400] + where
    return "does not load", " ".join(text.split())[:400] + where


def _where_else(extension: Extension, said: Mapping[str, Any], missing: Sequence[str]) -> str:
    told = []
    for op in missing:
        other = said.get("elsewhere", {}).get(op) or []
        told.append(f"{op} (it is there as {', '.join(other)})" if other else op)
    return f"not in torch.ops.{extension.namespace}: {', '.join(told)}; loaded {said['origin']}"


def _plain(schema: str) -> str:
    """Return a schema without its namespace and spacing, which torch prints in its own way."""
    return "".join(schema.rsplit("::", 1)[-1].split())


def _ended(status: int, err: bytes) -> dict[str, Any]:
    """Say how a child ended that did not come to its answer."""
    lines = err.decode("utf-8", "replace").strip().splitlines()
    # Thrown while a library is loaded, an error of torch's may end the process instead.
    if told := next((line for line in lines if "TORCH_LIBRARY" in line), ""):
        return {"state": "does not load", "text": told}
    ended = f"signal {-status}" if status < 0 else f"code {status}"
    why = _ENDS.get(status, f"the interpreter ended with {ended}")
    return {"state": "does not answer", "text": f"{why}: {(lines or ['no message'])[-1]}"}


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _command(python: str, extension: Extension) -> tuple[str, ...]:
    code = f"MARK = {MARK!r}\n{_ASK}"
    return (
        python,
        "-c",
        code,
        extension.module,
        extension.namespace,
        json.dumps(list(extension.ops)),
    )
