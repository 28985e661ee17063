"""Name what decides where the service imports the package from: each thing for what it is, and how
to mend it.

`origins` judges the answers of the probe; `traps` finds what lies in wait or undermines a proof
even though the import is right today. A trap that does harm makes a verify fail; any other is told.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .listing import normal
from .probe import _same_file
from .tree import TreeReader, join

_INFO = ".dist-info"
_NOT_WRITTEN = "no bytecode written"


class Cause(NamedTuple):
    """Why the import comes from elsewhere, and how to mend it."""

    why: str
    mend: str


class Trap(NamedTuple):
    kind: str
    where: str
    why: str
    mend: str
    harm: bool

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


class Setting(NamedTuple):
    """Where variables of the service's environment come from."""

    started: Mapping[str, str]  # what the agent itself was started with
    launch: Mapping[str, str]  # what the manifest adds
    env_script: str
    dist: str = ""  # the distribution that the base's record speaks of

    def source(self, name: str, entry: str = "") -> str:
        """Say who set a variable, or put one entry into it."""
        for values, text in ((self.launch, "launch.env of the manifest"), (self.started, "")):
            value = values.get(name)
            if value is not None and (not entry or entry in map(_clean, value.split(":"))):
                return text or "the environment that the agent was started in"
        if self.env_script:
            return f"env_script {self.env_script}"
        return "what starts the interpreter"


def origins(
    tree: TreeReader,
    package: str,
    python: Mapping[str, Any],
    answers: Mapping[str, Any],
    setting: Setting,
) -> dict[str, Any]:
    """Judge the answers: place -> {"state": "ok" or "shadowed", "file", "why", "mend"}."""
    wanted = tree.visible(f"{package}/__init__.py")
    return {
        name: _verdict(tree, package, wanted, {**python, **said}, setting)
        for name, said in answers.items()
    }


def _verdict(
    tree: TreeReader, package: str, wanted: str, said: Mapping[str, Any], setting: Setting
) -> dict[str, Any]:
    if missing := said.get("missing"):
        why = f"the launch folder {missing} is not there, so it was not asked"
        mend = "make the folder, or correct launch.dir in the manifest"
        return {"state": "not probed", "file": None, "why": why, "mend": mend}
    found = said["spec"].get("origin")
    if found and _same_file(found, wanted):
        cause = _bent(tree, package, said["spec"])
    else:
        cause = _cause(tree, package, said, setting)
    if cause is None:
        return {"state": "ok", "file": found, "why": "", "mend": ""}
    return {"state": "shadowed", "file": found, "why": cause.why, "mend": cause.mend}


def _bent(tree: TreeReader, package: str, spec: Mapping[str, Any]) -> Cause | None:
    """Say what is wrong with a package of the right origin: what is read of it, or where below."""
    first = next(iter(spec["places"] or []), "")
    mend = "find what installs that: a .pth file of a folder on sys.path, or sitecustomize"
    if not _same_file(first, tree.visible(package)):
        return Cause(f"what lies below {package} is looked for in {first or 'no folder'}", mend)
    if not spec["plain"]:
        return Cause(f"{spec['loader']} gives its code, which need not be that of the file", mend)
    return None


def unsearched(
    tree: TreeReader, package: str, answers: Mapping[str, Any], setting: Setting
) -> Cause | None:
    """Return why no import can come from the site, wherever the service starts; None: it can."""
    wanted = tree.visible(f"{package}/__init__.py")
    asked = [said for said in answers.values() if "path" in said]
    for said in asked:
        # A finder may lead to the package of a site that is not on the path.
        if _searches(tree, said) or _same_file(str(said["spec"].get("origin")), wanted):
            return None
    return _off_path(tree, asked[0], setting) if asked else None


def _searches(tree: TreeReader, said: Mapping[str, Any]) -> bool:
    """True when the site is on sys.path, under whatever name."""
    site = tree.visible("")
    return any(_same_file(os.path.join(said["cwd"], entry), site) for entry in said["path"])


def _off_path(tree: TreeReader, said: Mapping[str, Any], setting: Setting) -> Cause:
    folders = [entry for entry in said["path"] if entry and os.path.isdir(entry)]
    adds = f"env_script {setting.env_script}" if setting.env_script else "an env_script"
    return Cause(
        f"base.python does not search base.site: {tree.visible('')} is not on its sys.path",
        "name in base.python the service's own interpreter, and in base.site a folder that it"
        f" searches ({', '.join(folders) or 'none'}); or let {adds} put the site onto PYTHONPATH",
    )


def strangers(answers: Mapping[str, Any]) -> dict[str, str]:
    """Return the modules of the plan whose import finds something else, and what."""
    told: dict[str, str] = {}
    for place, said in sorted(answers.items()):
        for path, why in said.get("strangers", {}).items():
            told.setdefault(path, f"from {place}: {why}")
    return told


def _cause(tree: TreeReader, package: str, said: Mapping[str, Any], setting: Setting) -> Cause:
    spec = said["spec"]
    if not _searches(tree, said):
        return _off_path(tree, said, setting)
    if "error" in spec:
        return Cause(
            f"{package} cannot be found: {spec['error']}",
            "install the base anew; what is in the site is no package",
        )
    places = spec.get("places") or []
    if spec.get("origin") is None:
        return Cause(
            f"{package} is a namespace package without __init__.py: {', '.join(places)}",
            f"install the base anew, and remove a {package}/ that holds no package",
        )
    origin = str(spec["origin"])
    if archive := _archive(origin):
        return Cause(
            f"the zip archive {archive} holds a {package}/ and comes first",
            f"take {archive} off sys.path ({_who_adds(tree, archive, said, setting).why})",
        )
    # PACKAGE.py lies in the folder itself, PACKAGE/__init__.py in one below it.
    above = os.path.dirname(origin)
    entry = (os.path.dirname(above) if spec.get("places") is not None else above) or "/"
    on_path = [_clean(p or said["cwd"]) for p in said["path"]]
    if entry not in on_path and _clean(entry) not in on_path:
        return _finder(tree, package, origin, said)
    return _who_adds(tree, _clean(entry), said, setting)


def _archive(origin: str) -> str:
    """Return the file that `origin` lies in, as a zip on sys.path has it; "" for a real folder."""
    folder = os.path.dirname(origin)
    while folder not in ("", "/"):
        if os.path.isfile(folder):
            return folder
        if os.path.isdir(folder):
            return ""
        folder = os.path.dirname(folder)
    return ""


def _finder(tree: TreeReader, package: str, origin: str, said: Mapping[str, Any]) -> Cause:
    for name, module in said["finders"]:
        if "editable" in f"{name} {module}".lower():
            lines = _pth_lines(said["path"])
            pth = next((p for p, text in lines if module and module in text), "")
            return Cause(
                f"the finder of an editable install gives {origin} ({module or name}"
                + (f", loaded by {pth})" if pth else ")"),
                f"`pip uninstall {package}` for that install"
                + (f", or remove {pth}" if pth else "")
                + f"; then {tree.visible(package)} is what is imported",
            )
    ours = ", ".join(name for name, _ in said["finders"])
    custom = ", ".join(sorted(filter(None, said["customize"].values())))
    return Cause(
        f"a finder on sys.meta_path gives {origin} (one of {ours})",
        f"find what installs it: {custom or 'a .pth file of a folder on sys.path'}",
    )


def _who_adds(tree: TreeReader, entry: str, said: Mapping[str, Any], setting: Setting) -> Cause:
    """Say what put an entry onto sys.path before the site."""
    if entry == _clean(said["cwd"]):
        return Cause(
            f"the current folder {entry} comes first on sys.path",
            "start the service in another folder, or move what lies there away",
        )
    if entry in [_clean(p) for p in said["pythonpath"].split(":") if p]:
        source = setting.source("PYTHONPATH", entry)
        return Cause(f"PYTHONPATH puts {entry} first ({source})", f"take it out of {source}")
    if said["user_site"] and entry == _clean(said["user_site"]):
        return Cause(
            f"the user site {entry} comes first",
            "uninstall it as that user (`pip uninstall`), or start with PYTHONNOUSERSITE=1",
        )
    for pth, line in _pth_lines(said["path"]):
        if entry in line or _clean(os.path.join(os.path.dirname(pth), line)) == entry:
            return _pth(pth, entry)
    for name, path in sorted(said["customize"].items()):
        if entry in _text(path):
            return Cause(
                f"{name} ({path}) puts {entry} on sys.path",
                f"take the line out of {path}, or remove it if it is nobody's",
            )
    return Cause(
        f"sys.path has {entry} before {tree.visible('')}",
        "find who adds it: `python3 -v -c pass` shows what is loaded at the start",
    )


def _pth(pth: str, entry: str) -> Cause:
    name = os.path.basename(pth)
    if name.startswith("__editable__") or name == "easy-install.pth":
        return Cause(
            f"an editable install ({pth}) puts {entry} on sys.path",
            f"`pip uninstall` that install, or remove {pth}",
        )
    return Cause(f"{pth} puts {entry} on sys.path", f"remove {pth}, or the line in it")


def _pth_lines(path: list[str]) -> Iterator[tuple[str, str]]:
    for folder in path:
        for name in _names(folder):
            if name.endswith(".pth"):
                place = os.path.join(folder, name)
                for line in _text(place).splitlines():
                    if line.strip():
                        yield place, line.strip()


# --- what lies in wait


def traps(
    tree: TreeReader,
    package: str,
    python: Mapping[str, Any],
    answers: Mapping[str, Any],
    setting: Setting,
) -> list[dict[str, Any]]:
    """Return every trap, sorted by kind and place."""
    path: list[str] = next((said["path"] for said in answers.values() if "path" in said), [])
    found = [
        *_bytecode(python, setting),
        *_twins(tree, package, path, setting),
        *_links(tree, path),
        *_waiting(tree, package),
    ]
    return [trap.to_json() for trap in sorted(found)]


def worth_telling(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out what stands in the evidence only: most images set it, and nobody has to act."""
    return [trap for trap in found if trap["kind"] != _NOT_WRITTEN]


def _bytecode(python: Mapping[str, Any], setting: Setting) -> Iterator[Trap]:
    if prefix := python["pycache_prefix"]:
        source = setting.source("PYTHONPYCACHEPREFIX")
        yield Trap(
            "pycache prefix",
            str(prefix),
            "the service reads its bytecode from there, and what is proven of the site's is void",
            f"take PYTHONPYCACHEPREFIX out of {source}",
            harm=True,
        )
    if level := python["optimize"]:
        source = setting.source("PYTHONOPTIMIZE")
        yield Trap(
            "optimised bytecode",
            f"PYTHONOPTIMIZE (level {level})",
            f"asserts are left out, and the service reads and writes .opt-{level}.pyc files: what"
            " is proven of the others is void",
            f"take PYTHONOPTIMIZE out of {source}",
            harm=True,
        )
    if not python["writes_bytecode"]:
        yield Trap(
            _NOT_WRITTEN,
            "PYTHONDONTWRITEBYTECODE",
            "modules that nobody compiled are compiled anew at every start; those of the plan are"
            " there already",
            f"nothing has to be done; it is set by {setting.source('PYTHONDONTWRITEBYTECODE')}",
            harm=False,
        )


def _twins(tree: TreeReader, package: str, path: list[str], setting: Setting) -> Iterator[Trap]:
    """Several records of one distribution: which one is believed depends on their order."""
    names = {normal(package), normal(setting.dist)}
    site, before = _clean(tree.visible("")), True
    for folder in dict.fromkeys(_clean(entry) for entry in path if entry):
        infos = [n for n in _names(folder) if n.endswith((_INFO, ".egg-info", ".egg-link"))]
        ours = [name for name in infos if _dist(name) in names]
        if folder == site:
            before = False
            if len(ours) > 1:
                yield Trap(
                    "second dist-info",
                    ", ".join(join(folder, name) for name in ours),
                    f"which of them tells the version of {package} is chance",
                    "remove those whose version is not installed, or install the base anew",
                    harm=True,
                )
            continue
        for name in ours:
            yield Trap(
                "second dist-info",
                join(folder, name),
                f"another install of {package} is recorded there"
                + (", and its version is the one that is told" if before else ""),
                f"`pip uninstall` it there, or remove {join(folder, name)}",
                harm=before,
            )


def _links(tree: TreeReader, path: list[str]) -> Iterator[Trap]:
    site = tree.visible("")
    real = os.path.realpath(site)
    for entry in dict.fromkeys(path):
        if entry and entry.rstrip("/") != site and os.path.realpath(entry) == real:
            yield Trap(
                "linked site",
                entry,
                f"it is {site} by another name: tracebacks and bytecode may have either",
                "nothing has to be done; name the same one in base.site to see one name only",
                harm=False,
            )


def _waiting(tree: TreeReader, package: str) -> Iterator[Trap]:
    """An editable install of the package in the site, whether it wins today or not."""
    for name in tree.names(""):
        if not (name.startswith("__editable__") and name.endswith(".pth")):
            continue
        if normal(package) in normal(name):
            yield Trap(
                "editable install",
                tree.visible(name),
                f"it leads imports of {package} to a work tree as soon as it comes first",
                f"`pip uninstall {package}` for that install, or remove the file",
                harm=False,
            )


def _dist(name: str) -> str:
    stem = name.rpartition(".")[0]
    # NAME-VERSION.dist-info, NAME-VERSION-py3.10.egg-info, NAME.egg-link
    return normal(stem.partition("-")[0])


def _clean(path: str) -> str:
    return os.path.realpath(path) if path else ""


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder or "."))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
