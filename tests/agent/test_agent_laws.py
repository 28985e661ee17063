"""Laws over arbitrary plans: twice is once, undo undoes, nothing leaves the site."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.agent.target import BASE_FILES, Target, compile_all, difference, planned

NAMES = st.sampled_from(["a.py", "b.py", "__init__.py", "c.json", "core.py", "old.py", "中 文.py"])
FOLDERS = st.sampled_from(["pack", "pack/lonely", "pack/new", "pack/new/deep", "other"])
PATHS = st.builds(lambda folder, name: f"{folder}/{name}", FOLDERS, NAMES)
CONTENTS = st.one_of(st.none(), st.sampled_from([b"", b"V = 1\n", b"V = 2\n", b"#" * 70_000]))
PLANS = st.dictionaries(PATHS, CONTENTS, min_size=1, max_size=6)


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # a shrink of processes would take minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(first=PLANS, second=PLANS, compiled=st.booleans())
def test_twice_is_once_undo_undoes_and_nothing_leaves_the_site(
    first: dict[str, bytes | None], second: dict[str, bytes | None], compiled: bool
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="laws-"))
    try:
        target = Target(folder / "root")
        target.make(BASE_FILES)
        if compiled:
            compile_all(target)
        before = target.snapshot()
        for files in (first, second):
            # JSON files hold whatever; that is the plan's business, not the agent's.
            plan = target.plan(*(planned(path, data) for path, data in files.items()))
            bundle = target.bundle(plan, list(files.values()))

            once = target.run(bundle, "deploy")
            assert once.code == 0, once.err
            assert target.run(bundle, "verify", "--recompile").states in ({}, gone_package(files))
            state = target.snapshot()
            again = target.run(bundle, "deploy")

            assert again.evidence["outcome"] == "nothing to do"
            assert difference(state, target.snapshot()) == {}
            beyond = [path for path in difference(before, state) if not inside(path)]
            assert beyond == []
        assert target.run(bundle, "restore").code == 0
        assert difference(before, target.snapshot()) == {}
    finally:
        shutil.rmtree(folder)


def inside(path: str) -> bool:
    site = "usr/lib/python3/dist-packages/"
    return path.startswith((f"{site}pack", f"{site}other", f"{site}.dcu-bundle"))


def gone_package(files: dict[str, bytes | None]) -> dict[str, str]:
    """A plan that removes the package's own __init__.py leaves nothing to import."""
    if files.get("pack/__init__.py", b"") is None:
        return {"pack/__init__.py": "shadowed"}
    return {}
