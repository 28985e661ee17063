"""The compiler cache of a build: hits from any folder, and none across two toolchains.

A device library is linked into every kernel, yet ccache looks at the compiler's file only, and with
a wrapper in front not even at the compiler. So the identity of the whole toolchain stands for the
compiler, and separates the namespaces.

Its direct mode compares the headers that the compiler read the last time, and so never sees one
that was not there then and now comes first in the search. Every call preprocesses instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from deploy.errors import BundleError

from .disk import is_remote, mount_of
from .runner import Runner

HITS = ("direct_cache_hit", "preprocessed_cache_hit")
MISS = "cache_miss"
_UNCACHEABLE = (
    "bad_compiler_arguments",
    "could_not_use_modules",
    "could_not_use_precompiled_header",
    "multiple_source_files",
    "output_to_stdout",
    "unsupported_code_directive",
    "unsupported_compiler_option",
    "unsupported_environment_variable",
    "unsupported_source_language",
)


def environment(folder: Path, size: int, base: Path, identity: str) -> dict[str, str]:
    """Return the settings of one build. `base` holds both source and build folder.

    Paths below `base` are made relative, so that a second checkout finds what the first stored.
    """
    return {
        "CCACHE_DIR": str(folder),
        "CCACHE_CONFIGPATH": os.devnull,  # `ignore_options` in a file would give old code
        "CCACHE_NODIRECT": "1",
        "CCACHE_BASEDIR": str(base),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_COMPILERCHECK": f"string:{identity}",
        "CCACHE_NAMESPACE": identity[:16],
        "CCACHE_MAXSIZE": f"{max(size // 2**20, 1)}Mi",
    }


def without(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without settings of ccache's: env_script must not set any either."""
    return {key: value for key, value in env.items() if not key.startswith("CCACHE_")}


def statistics(ccache: str, runner: Runner, env: Mapping[str, str]) -> dict[str, int]:
    """Return ccache's counters; empty when this ccache cannot print them."""
    try:
        said = runner.ask((ccache, "--print-stats"), env=env, cwd=Path("/"))
    except BundleError:
        return {}
    rows = (line.split("\t") for line in said.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return hits, misses and uncacheable calls between two readings."""
    delta = {key: count - before.get(key, 0) for key, count in after.items()}
    return {
        "hits": sum(delta.get(key, 0) for key in HITS),
        "misses": delta.get(MISS, 0),
        "uncacheable": sum(delta.get(key, 0) for key in _UNCACHEABLE),
    }


def warnings(folder: Path, counted: Mapping[str, int], warm: bool) -> list[str]:
    """Return what is odd about the cache. `warm` says that these sources were compiled before."""
    found = []
    mount, kind = mount_of(folder)
    if is_remote(kind):
        found.append(f"ccache folder {folder} lies on {mount} ({kind}): it will be slow")
    if warm and counted["misses"] and not counted["hits"]:
        found.append(
            "ccache had nothing of a build that it should know: the toolchain changed, or the"
            " folder of source and build no longer lie below one CCACHE_BASEDIR"
        )
    return found
