"""The kernel's log is everybody's; only what is surely ours is called ours."""

from __future__ import annotations

from deploy.agent import oom
from deploy.agent.oom import Kill

OURS, THEIRS = "a" * 64, "b" * 64


def line(group: str, seconds: str = "[  100.500000] ", pid: int = 4187) -> str:
    return (
        f"{seconds}oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,"
        f"oom_memcg=/docker/{group},task_memcg=/docker/{group},task=VLLM::EngineCor,pid={pid},uid=0\n"
    )


def test_a_kill_is_read_from_either_form_of_the_log() -> None:
    lines = [
        "[    1.000000] usb 1-1: new device\n",
        line(OURS),
        line(OURS, "3,1200,200250000,-;"),
        "[  101.0] Memory cgroup out of memory: Killed process 4187 (VLLM::EngineCor)\n",
        "\n",
    ]

    assert oom.parse(lines) == (
        Kill(100.5, f"/docker/{OURS}", "VLLM::EngineCor", 4187),
        Kill(200.25, f"/docker/{OURS}", "VLLM::EngineCor", 4187),
    )


def test_only_this_container_after_the_start_is_ours() -> None:
    kills = oom.parse([line(OURS, "[ 50.0] "), line(OURS), line(THEIRS), line("system.slice")])

    ours, unknown = oom.attributed(kills, OURS, since=60.0)

    assert [kill.seconds for kill in ours] == [100.5]
    assert unknown == 0


def test_outside_of_containers_a_containers_kill_is_not_ours() -> None:
    kills = oom.parse([line(OURS), line("system.slice", pid=7)])

    ours, _ = oom.attributed(kills, "", since=0.0)

    assert [kill.host_pid for kill in ours] == [7]


def test_where_nobody_knows_which_container_this_is_nothing_is_attributed() -> None:
    kills = oom.parse([line(OURS), line(THEIRS)])

    assert oom.attributed(kills, "?", since=0.0) == ((), 2)


def test_the_real_log_can_be_read_or_says_why_not() -> None:
    found = oom.look(0.0)

    assert found["error"] or isinstance(found["ours"], list)
    assert oom.here() in ("", "?") or len(oom.here()) == 64
