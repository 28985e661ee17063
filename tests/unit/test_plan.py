"""The plan: pure, sorted, safe to act on, and one digest for one meaning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.agent.plan import ABSENT, BadPlan, Plan, PlannedFile, State, tree_digest
from deploy.errors import BadValues
from deploy.plan import make_plan
from deploy.values import Blob, Change, Delta, PathClass

A, B = "a" * 64, "b" * 64


def blob(sha: str = A, mode: str = "100644", **more: Any) -> Blob:
    return Blob(oid="1" * 40, mode=mode, sha256=sha, size=3, **more)


def change(path: str, old: Blob | None, new: Blob | None, cls: str = "overlay") -> Change:
    return Change(path=path, old=old, new=new, cls=PathClass(cls), reason="include vllm/**")


def plan_of(*changes: Change, **more: Any) -> Plan:
    delta = Delta(base="b" * 40, head="c" * 40, head_time=1, changes=changes)
    site = "/usr/lib/python3/dist-packages"
    return make_plan(
        name="demo", package="vllm", python="/usr/bin/python3", site=site, delta=delta, **more
    )


def test_a_modified_an_added_and_a_deleted_path_say_what_may_be_there_before() -> None:
    plan = plan_of(
        change("vllm/gone.py", blob(A), None),
        change("vllm/mod.py", blob(A), blob(B, "100755")),
        change("vllm/new.json", None, blob(B)),
    )

    gone, mod, new = plan.files
    assert gone.want == ABSENT
    assert gone.assume == (State(type="file", mode="0644", sha256=A, size=3),)
    assert mod.want == State(type="file", mode="0755", sha256=B, size=3)
    assert new.assume == (ABSENT,)
    assert [entry.role for entry in plan.files] == ["module", "module", "data"]
    assert [entry.compiled for entry in plan.files] == [False, True, False]


def test_kernel_sources_and_ignored_paths_never_enter_a_plan() -> None:
    plan = plan_of(
        change("csrc/rocm/k.cu", blob(A), blob(B), "kernel"),
        change("tests/t.py", None, blob(B), "ignored"),
    )

    assert plan.files == ()


def test_a_link_keeps_its_text_and_may_not_lead_out_of_the_site() -> None:
    inside = plan_of(change("vllm/l", None, blob(mode="120000", link="sub/x.py")))
    assert inside.files[0].want == State(type="link", link="sub/x.py")

    for leads_out in ("/etc/passwd", "../../x", "a/../../../x"):
        with pytest.raises(BadPlan, match="not usable"):
            plan_of(change("vllm/l", None, blob(mode="120000", link=leads_out)))


def test_accepted_vendor_bytes_are_further_assumptions_and_idle_ones_are_refused() -> None:
    plan = plan_of(change("vllm/a.py", blob(A), blob(B)), accept={"vllm/a.py": ["c" * 64]})
    assert [state.sha256 for state in plan.files[0].assume] == [A, "c" * 64]

    with pytest.raises(BadValues, match="does not replace"):
        plan_of(change("vllm/a.py", blob(A), blob(B)), accept={"vllm/other.py": ["c" * 64]})


def test_a_submodule_cannot_be_planned() -> None:
    with pytest.raises(BadValues, match="cannot plan third"):
        plan_of(change("third", None, blob(mode="160000")))


def test_an_artefact_may_not_take_a_path_of_the_diff() -> None:
    artefact = PlannedFile(
        path="vllm/a.py", want=State(type="file", mode="0755", sha256=B, size=1), assume=(ABSENT,)
    )

    with pytest.raises(BadValues, match="two sources claim one path"):
        plan_of(change("vllm/a.py", blob(A), blob(B)), artefacts=[artefact])


def test_a_plan_parses_back_to_itself_with_the_same_identities() -> None:
    plan = plan_of(change("vllm/a.py", blob(A), blob(B)), requires={"vllm": "0.18.1"})

    again = Plan.parse(plan.to_json())

    assert again == plan
    assert (again.digest, again.payload, again.tree) == (plan.digest, plan.payload, plan.tree)


def test_the_payload_changes_with_contents_that_the_digests_of_a_plan_do_not_name() -> None:
    one = plan_of(change("vllm/a.py", blob(A), blob(B)))
    two = plan_of(change("vllm/a.py", blob(A), blob("c" * 64)))

    assert len({one.digest, two.digest, one.payload, two.payload, one.tree, two.tree}) == 6


def base_json() -> dict[str, Any]:
    return plan_of(change("vllm/a.py", blob(A), blob(B)), requires={"vllm": "1"}).to_json()


HOSTILE: dict[str, Any] = {
    "absolute path": lambda p: p["files"][0].update(path="/etc/passwd"),
    "path that climbs": lambda p: p["files"][0].update(path="vllm/../../x"),
    "empty part": lambda p: p["files"][0].update(path="vllm//x"),
    "nul in path": lambda p: p["files"][0].update(path="vllm/\0x"),
    "lone surrogate": lambda p: p["files"][0].update(path="vllm/\udcff"),
    "agent's own folder": lambda p: p["files"][0].update(path=".dcu-bundle/journal"),
    "bytecode": lambda p: p["files"][0].update(path="vllm/__pycache__/a.pyc"),
    "long name": lambda p: p["files"][0].update(path="vllm/" + "x" * 256),
    "setuid mode": lambda p: p["files"][0]["want"].update(mode="4755"),
    "mode as number": lambda p: p["files"][0]["want"].update(mode=644),
    "size as bool": lambda p: p["files"][0]["want"].update(size=True),
    "short sha": lambda p: p["files"][0]["want"].update(sha256="ab"),
    "unknown type": lambda p: p["files"][0]["want"].update(type="device"),
    "no assumption": lambda p: p["files"][0].update(assume=[]),
    "unknown key": lambda p: p["files"][0].update(run="rm"),
    "unknown role": lambda p: p["files"][0].update(role="hook"),
    "twice": lambda p: p["files"].append(copy.deepcopy(p["files"][0])),
    "file and folder": lambda p: p["files"].append({**p["files"][0], "path": "vllm/a.py/b"}),
    "files no list": lambda p: p.update(files={}),
    "other schema": lambda p: p.update(schema="plan/2"),
    "relative site": lambda p: p.update(site="usr/lib"),
    "site that climbs": lambda p: p.update(site="/usr/../etc"),
    "no python": lambda p: p.update(python=""),
    "requires no map": lambda p: p.update(requires=["vllm"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_plan_does_not_parse(name: str) -> None:
    raw = base_json()
    Plan.parse(copy.deepcopy(raw))  # the same document without the fault is fine
    HOSTILE[name](raw)

    with pytest.raises(BadPlan) as caught:
        Plan.parse(raw)

    assert caught.value.exit == 4
    assert caught.value.why
    assert caught.value.fix


states = st.one_of(
    st.just(ABSENT),
    st.builds(
        State,
        type=st.just("file"),
        mode=st.sampled_from(["0644", "0755"]),
        sha256=st.sampled_from([A, B]),
        size=st.integers(0, 9),
    ),
    st.builds(State, type=st.just("link"), link=st.sampled_from(["x", "y"])),
)


@given(rows=st.dictionaries(st.sampled_from("abcdef"), states, max_size=6))
def test_the_tree_digest_knows_no_order_and_forgets_nothing_but_sizes(
    rows: dict[str, State],
) -> None:
    forwards = tree_digest(iter(rows.items()))

    assert tree_digest(iter(reversed(list(rows.items())))) == forwards
    for path, state in rows.items():
        other = ABSENT if not state.absent else State(type="link", link="z")
        assert tree_digest(iter({**rows, path: other}.items())) != forwards
