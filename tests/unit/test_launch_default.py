"""A launch whose manifest leaves the port at its default; a meaning holds no defaults."""

from __future__ import annotations

from deploy.agent.launch import Launch


def test_a_port_that_was_not_typed_is_the_manifests_default() -> None:
    found = Launch.of_manifest({"launch": {"dir": "/root/submission"}})

    assert found.port == 8000
    assert found.argv[-2:] == ("--port", "8000")
