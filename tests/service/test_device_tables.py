"""The card's tools, read by the names of their columns.

No card is here: the tools are stand-ins that print recorded layouts, refusals included.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deploy.agent import device, faults

FIXTURES = Path(__file__).parent / "fixtures"


def text(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


def standin(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def table(memory: str, busy: str) -> str:
    return (
        "HCU     Temp     AvgPwr     Perf     PwrCap     VRAM%      HCU%      Mode\n"
        f"0       53.0C    139.0W     high     300.0W     {memory}    {busy}    Normal\n"
    )


def seen(memory: str, busy: str, pids: str = "", **row: Any) -> dict[str, Any]:
    """A look at a machine on which nothing else runs."""
    cards = [card.to_json() for card in device.cards(table(memory, busy))]
    holders = [holder.to_json() for holder in device.holders(pids)]
    processes = [{"pid": 7, "role": "other", "state": "S", "container": "", "orphan": False,
                  "argv": ["x"], "comm": "x", **row}] if row else []  # fmt: skip
    return {
        "processes": processes, "listeners": [], "bound": False, "hidden": 0, "seen": 1,
        "cards": {"cards": cards, "host_processes": holders},
    }  # fmt: skip


def test_the_newest_table_is_read() -> None:
    assert device.cards(text("hysmi_table")) == (
        device.Card(index=0, memory=95.0, busy=87.5, mode="Normal"),
        device.Card(index=1, memory=0.0, busy=0.0, mode="MIG"),
    )


def test_the_older_table_is_read_by_its_own_names() -> None:
    assert device.cards(text("hysmi_table_dcu")) == (
        device.Card(index=0, memory=82.0, busy=41.0, mode="Normal"),
        device.Card(index=1, memory=0.0, busy=0.0, mode="N/A"),
    )


def test_what_the_tool_does_not_know_is_unknown_and_not_idle() -> None:
    [card] = device.cards(text("hysmi_table_unavailable"))

    assert card.busy is None
    assert card.memory == 0.0


def test_columns_may_stand_in_any_order() -> None:
    swapped = "HCU  Mode  HCU%  VRAM%\n3  Normal  1.5%  12%\n"

    assert device.cards(swapped) == (device.Card(index=3, memory=12.0, busy=1.5, mode="Normal"),)


@pytest.mark.parametrize(
    "wrong", ["", "no table\n", "HCU VRAM%\n0\n", "0 1 2\n", "HCU VRAM%\nx 1\n"]
)
def test_what_is_no_table_is_no_card(wrong: str) -> None:
    assert device.cards(wrong) == ()


def test_host_pids_are_read_with_their_cards() -> None:
    assert device.holders(text("hysmi_showpids")) == (
        device.Holder(host_pid=1840213, cards=(0,), memory=62104.0, percent=94.0),
        device.Holder(host_pid=1840977, cards=(0, 1), memory=388.0, percent=None),
    )
    assert device.holders(text("hysmi_showpids_empty")) == ()
    assert device.holders("No KFD PIDs currently running!\n") == ()


def test_accelerators_are_named_and_cpus_are_not() -> None:
    assert device.agents(text("rocminfo_excerpt")) == (
        device.Agent(
            name="gfx936", marketing="BW", units=80, wavefront=64, memory=67092480,
            isa="gfx936:sramecc+:xnack-",
        ),
    )  # fmt: skip
    assert device.agents("ROCm is not here\n") == ()


def test_memory_that_nobody_here_holds_is_held_outside() -> None:
    for pids in ("", "PID: 28290\n\tHCU Index: ['0']\n\tVRAM USED(MiB): 62464\n"):
        found = faults.before_start(seen("96%", "0%", pids))

        assert [fault.what for fault in found] == ["card"]
        assert "a process outside this PID namespace" in found[0].text
    assert "host pids 28290, not pids of here" in found[0].text


def test_a_full_card_of_one_healthy_server_is_no_fault() -> None:
    looked = seen("96%", "0%")
    looked["server"] = {
        "pid": 7, "members": [7], "words": [], "options": [], "interpreter": None, "folder": "",
        "environment": [], "mapped": [], "installed": [], "started": 0.0, "deployed": 0.0,
    }  # fmt: skip
    looked["run"] = {"pid": 7, "state": "running", "plan": "", "receipt": ""}
    looked["listeners"] = [{"address": "127.0.0.1", "port": 1, "pids": [7]}]
    looked["model"] = []

    from deploy.agent.launch import Launch

    assert faults.after_start(looked, Launch(port=1), asked=False) == ()


def test_an_idle_card_is_clean_and_an_unknown_one_only_warns() -> None:
    assert faults.before_start(seen("0%", "0.0%")) == ()
    assert [f.warning for f in faults.before_start(seen("N/A", "N/A"))] == [True]


def test_whoever_holds_the_device_is_named_in_another_container_too() -> None:
    held = faults.before_start(seen("0%", "0%", devices=["/dev/kfd"]))
    foreign = faults.before_start(seen("0%", "0%", devices=["/dev/kfd"], container="ab12"))

    assert [fault.what for fault in held] == ["device"]
    assert "in another container (ab12)" in foreign[0].text


def test_a_tool_is_asked_with_an_end_to_its_time(tmp_path: Path) -> None:
    slow = standin(tmp_path, "slow", "exec sleep 60")
    broken = standin(tmp_path, "broken", "echo something; echo no device; exit 4")
    colour = standin(
        tmp_path, "good", f"printf '\\033[31mWarning\\033[0m\\n'; cat {FIXTURES}/hysmi_table.txt"
    )

    assert "timed out" in device.ask((str(slow),), timeout=0.3).error
    assert device.ask((str(broken),)).error == "exit 4: no device"
    assert len(device.cards(device.ask((str(colour),)).output)) == 2
    assert (
        device.ask(("/nowhere/hy-smi",)).error == "none of /nowhere/hy-smi is there and executable"
    )


def test_a_look_takes_table_and_pids_of_the_same_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin(
        tmp_path, "hy-smi",
        f'if [ "$1" = --showpids ]; then cat {FIXTURES}/hysmi_showpids.txt;'
        f" else cat {FIXTURES}/hysmi_table.txt; fi",
    )  # fmt: skip
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    found = device.look()

    assert found["tool"] == str(tmp_path / "hy-smi")
    assert [card["memory"] for card in found["cards"]] == [95.0, 0.0]
    assert [row["host_pid"] for row in found["host_processes"]] == [1840213, 1840977]


def test_a_tool_that_lists_no_card_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin(tmp_path, "hy-smi", "echo; echo ==== End of SMI Log ====")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert device.look()["error"] == "it lists no card"
