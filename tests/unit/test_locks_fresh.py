"""The locks of this checkout are those of its own agent and templates: the first command works."""

from __future__ import annotations

import pytest

from deploy import bundle, scripts
from deploy import manifest as manifests
from deploy.layout import HERE
from deploy.lock import check_fresh, read_lock


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_a_lock_is_that_of_this_checkout(name: str) -> None:
    lock, manifest = read_lock(HERE.lock(name)), manifests.load(HERE.manifest(name))

    check_fresh(lock, manifest)
    hint = f"run ./inv lock -n {name} and commit it"
    assert lock.expect["agent"] == bundle.agent_digest(), hint
    assert lock.inputs["scripts"] == scripts.pinned(scripts.on_target(manifest)), hint
