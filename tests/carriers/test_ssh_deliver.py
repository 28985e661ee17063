"""Deploy over a real sshd: what is needed there, what may be odd there, and what comes back."""

from __future__ import annotations

import json
import marshal
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.lock import Lock
from deploy.agent.tree import TreeWriter
from deploy.agent.words import Exit, Verb
from deploy.carriers import Request
from deploy.carriers.ssh_line import Line, Stream
from deploy.errors import Unfit, Unreachable
from tests.agent.target import AGENT, BASE_FILES, SITE, difference
from tests.carriers.relay import Relay
from tests.carriers.remote import Remote
from tests.carriers.sshd import Sshd

pytestmark = pytest.mark.sshd

# A slow start-up file of this machine's account is not what is tested here.
PLAIN = "SetEnv SHLVL=5"


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    made = Remote(tmp_path, PLAIN).start()
    yield made
    made.stop()


def started(folder: Path, *config: str, **host: object) -> Iterator[Remote]:
    made = Remote(folder, *config, **host).start()
    try:
        yield made
    finally:
        made.stop()


def test_a_deploy_needs_no_sftp_and_leaves_nothing_but_the_plan(remote: Remote) -> None:
    said = remote.deploy()

    assert [found.exit for found in said] == [Exit.OK, Exit.OK]
    assert remote.is_new()
    assert said[1].verb is Verb.VERIFY
    assert {place["state"] for place in said[1].origin.values()} == {"ok"}
    assert not list(remote.target.root.rglob("*.pyz"))


def test_the_evidence_equals_that_of_the_same_bundle_run_by_hand(remote: Remote) -> None:
    bundle = remote.bundle()
    over_ssh = remote.deploy(bundle)[1]
    local = bundle.path
    by_hand = remote.target.run(
        type("Known", (), {"path": local})(), "verify", python="/usr/bin/python3"
    )

    ours, theirs = dict(over_ssh.raw), dict(by_hand.evidence)
    ours.pop("incidental"), theirs.pop("incidental")
    assert ours == theirs


def test_a_second_deploy_sends_no_content_and_changes_nothing(remote: Remote) -> None:
    bundle = remote.bundle()
    remote.deploy(bundle)
    before = remote.target.snapshot()

    [said] = remote.deploy(bundle)

    # One verify shows all: that nothing is to be done, and that it is as planned.
    assert (said.exit, said.outcome, said.raw["verb"]) == (Exit.OK, "verified", Verb.VERIFY)
    assert said.raw["met"] == "deployed"
    assert said.raw["incidental"]["sent"] < 30_000
    assert difference(before, remote.target.snapshot()) == {}


def test_a_file_that_was_changed_since_the_deploy_is_refused_as_ever(remote: Remote) -> None:
    bundle = remote.bundle()
    remote.deploy(bundle)
    remote.target.write("pack/core.py", b"edited by hand\n")

    [said] = remote.deploy(bundle)

    assert (said.exit, said.raw["verb"]) == (Exit.REFUSED, Verb.DEPLOY)
    assert said.raw["met"] == "drifted"
    assert remote.target.read("pack/core.py") == b"edited by hand\n"


def test_a_redeploy_to_a_bare_site_takes_every_content_from_the_store(remote: Remote) -> None:
    bundle = remote.bundle()
    remote.deploy(bundle)
    shutil.rmtree(remote.target.root)
    remote.target.make(BASE_FILES)

    said = remote.deploy(bundle)

    assert remote.is_new()
    assert said[0].raw["met"] == "rebuilt since"
    assert said[0].raw["before"]["plan"] == bundle.plan.digest
    assert said[0].raw["incidental"]["received"] == 0
    assert said[0].raw["incidental"]["sent"] < 30_000


def test_a_spoilt_content_of_the_store_is_asked_for_again(remote: Remote) -> None:
    bundle = remote.bundle()
    remote.deploy(bundle)
    shutil.rmtree(remote.target.root)
    remote.target.make(BASE_FILES)
    for path in (remote.state / "blobs").iterdir():
        path.write_bytes(b"spoilt")

    said = remote.deploy(bundle)

    assert [found.exit for found in said] == [Exit.OK, Exit.OK]
    assert remote.is_new()
    assert said[0].raw["incidental"]["received"] > 0


@pytest.mark.parametrize("state_dir", ["", "/proc/nowhere/state"])
def test_without_a_writable_home_everything_comes_over_the_line(
    tmp_path: Path, state_dir: str
) -> None:
    for remote in started(tmp_path, PLAIN, state_dir=state_dir):
        bundle = remote.bundle()

        assert [found.exit for found in remote.deploy(bundle)] == [Exit.OK, Exit.OK]
        assert [found.exit for found in remote.deploy(bundle)] == [Exit.OK]

        assert remote.is_new()


def test_what_is_met_is_told_apart(remote: Remote) -> None:
    bundle = remote.bundle()

    met = [remote.ask(Verb.CHECK, bundle).raw["met"]]
    remote.deploy(bundle)
    met.append(remote.ask(Verb.CHECK, bundle).raw["met"])
    remote.target.write("pack/core.py", b"V = 'by hand'\n")
    edited = remote.ask(Verb.CHECK, bundle)
    met.append(edited.raw["met"])

    assert met == ["first contact", "deployed", "drifted"]
    assert edited.exit == Exit.REFUSED
    assert [row["path"] for row in edited.raw["conflicts"]] == ["pack/core.py"]


def test_if_needed_leaves_a_good_target_alone_and_mends_a_bare_one(remote: Remote) -> None:
    bundle = remote.bundle()
    remote.deploy(bundle)

    good = remote.deploy(bundle, if_needed=True)
    shutil.rmtree(remote.target.root)
    remote.target.make(BASE_FILES)
    mended = remote.deploy(bundle, if_needed=True)

    assert [found.verb for found in good] == [Verb.VERIFY]
    assert [found.verb for found in mended] == [Verb.DEPLOY, Verb.VERIFY]
    assert remote.is_new()


def test_a_file_edited_by_hand_refuses_the_plan_and_nothing_changes(remote: Remote) -> None:
    remote.target.write("pack/table.json", b"edited")
    before = remote.target.snapshot()

    said = remote.deploy()

    assert [found.exit for found in said] == [Exit.REFUSED]
    assert difference(before, remote.target.snapshot()) == {}


def test_what_hosts_yaml_overrides_shows_in_the_evidence_and_not_in_the_plan(
    remote: Remote,
) -> None:
    (remote.target.root / "elsewhere").mkdir()
    remote.host = replace(remote.host, launch_dir="/elsewhere")
    bundle = remote.bundle()

    said = remote.deploy(bundle)

    assert said[1].raw["incidental"]["overrides"] == {"launch_dir": "/elsewhere"}
    assert said[1].raw["plan"] == bundle.plan.digest


def test_values_arrive_exactly_and_are_never_run(remote: Remote, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    operator = f"a b; touch {mark}; $(touch {mark}) `touch {mark}` '\" \\ 中文"

    remote.carrier().deliver_in_turn(
        remote.bundle(), [Request(verb=Verb.DEPLOY, operator=operator)], tell=remote.lines.append
    )
    facts = remote.ask(Verb.FACTS)

    assert facts.raw["incidental"]["deployed"]["operator"] == operator
    assert not mark.exists()


def test_paths_outside_ascii_arrive_under_a_bare_c_locale(tmp_path: Path) -> None:
    files = {"pack/中文 名.py": b"NAME = '\xe4\xb8\xad'\n", "pack/-dash.json": b"{}"}
    for remote in started(tmp_path, "SetEnv SHLVL=5 LANG=C LC_ALL=C"):
        said = remote.deploy(remote.bundle(files))

        assert [found.exit for found in said] == [Exit.OK, Exit.OK]
        assert remote.target.read("pack/中文 名.py") == files["pack/中文 名.py"]


def test_a_banner_and_a_talkative_start_are_not_taken_for_answers(tmp_path: Path) -> None:
    noise = tmp_path / "noise"
    noise.write_text(
        '#!/bin/sh\necho "Welcome to node7"; head -c 100000 /dev/urandom; echo\n'
        'echo "$SSH_ORIGINAL_COMMAND"\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    noise.chmod(0o755)
    banner = tmp_path / "banner"
    banner.write_text("authorised use only\n" * 50)

    for remote in started(tmp_path, f"ForceCommand {noise}", f"Banner {banner}"):
        assert [found.exit for found in remote.deploy()] == [Exit.OK, Exit.OK]
        assert remote.is_new()


@pytest.mark.parametrize("shell", ["dash", "tcsh", "zsh", "fish"])
def test_the_login_shell_need_not_be_bash(tmp_path: Path, shell: str) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"apt-get install {shell}")
    login = tmp_path / "login"
    login.write_text(f'#!/bin/sh\nexec {found} -c "$SSH_ORIGINAL_COMMAND"\n')
    login.chmod(0o755)

    for remote in started(tmp_path, f"ForceCommand {login}"):
        assert [said.exit for said in remote.deploy()] == [Exit.OK, Exit.OK]


def test_a_shell_that_ends_the_session_is_named(tmp_path: Path) -> None:
    for remote in started(tmp_path, "ForceCommand echo This account is closed"):
        with pytest.raises(Unreachable) as caught:
            remote.deploy()

        assert "This account is closed" in caught.value.why
        assert remote.is_base()


def test_a_shell_that_never_stops_talking_is_cut(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("#!/bin/sh\nfor n in $(seq 50); do printf 'still %s ' $n; sleep 0.2; done\n")
    login.chmod(0o755)

    for remote in started(tmp_path, f"ForceCommand {login}"):
        remote.limits = replace(remote.limits, greeting=1)
        with pytest.raises(Unreachable) as caught:
            remote.deploy()

        assert "the agent never spoke" in caught.value.what
        assert "something else still spoke after 1 s; it said: still 1 " in caught.value.why
        assert "still 50" not in caught.value.why
        assert remote.is_base()


def folder_of_pythons(folder: Path, **pythons: str) -> str:
    """A PATH of the usual tools where only these interpreters are found."""
    for tool in ("sh", "head", "env", "dirname"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, path in pythons.items():
        (folder / name.replace("_", ".")).symlink_to(path)
    return str(folder)


def known_python(version: str) -> str:
    """An interpreter of this machine, its own or a version manager's."""
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in [*map(str, managed), shutil.which(f"python{version}")]:
        if path and subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip(f"there is no Python {version} on this machine")


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_any_fit_python_runs_the_agent(tmp_path: Path, version: str) -> None:
    python = known_python(version)
    bare = tmp_path / "bin"
    bare.mkdir()
    path = folder_of_pythons(bare, **{f"python{version}".replace(".", "_"): python})

    for remote in started(tmp_path, f"SetEnv SHLVL=5 PATH={path}"):
        said = remote.deploy()

        assert said[0].raw["incidental"]["agent_python"].startswith(version)


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.9"])
def test_an_old_python_is_named_and_nothing_changes(tmp_path: Path, version: str) -> None:
    python = known_python(version)
    bare = tmp_path / "bin"
    bare.mkdir()
    path = folder_of_pythons(bare, python3=python)

    for remote in started(tmp_path, f"SetEnv SHLVL=5 PATH={path}"):
        with pytest.raises(Unfit) as caught:
            remote.deploy()

        assert caught.value.exit == Exit.UNFIT
        assert f"python3 is Python {version}" in caught.value.why
        assert "python3.13 not found" in caught.value.why
        assert remote.is_base()


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("sudo: sorry, you must have a tty to run sudo", "wants a terminal"),
        ("sudo: a password is required", "wants a password"),
        ("sudo: a terminal is required to read the password", "wants a password"),
    ],
)
def test_sudo_that_asks_is_refused_by_its_reason(tmp_path: Path, said: str, word: str) -> None:
    stub = tmp_path / "bin" / "sudo"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    stub.chmod(0o755)
    path = f"{stub.parent}:/usr/bin:/bin"

    for remote in started(tmp_path, f"SetEnv SHLVL=5 PATH={path}", sudo=True):
        with pytest.raises(Unfit) as caught:
            remote.deploy()

        assert word in caught.value.why
        assert remote.is_base()


def test_sudo_without_a_password_runs_the_agent(tmp_path: Path) -> None:
    if shutil.which("sudo") is None:
        pytest.skip("apt-get install sudo")
    for remote in started(tmp_path, PLAIN, sudo=True):
        assert [found.exit for found in remote.deploy()] == [Exit.OK, Exit.OK]


def test_an_unknown_host_key_stops_before_anything_is_asked(remote: Remote) -> None:
    carrier = remote.carrier(pins={})

    with pytest.raises(Unreachable) as caught:
        carrier.deliver(remote.bundle(), Request(verb=Verb.DEPLOY))

    assert caught.value.exit == Exit.UNREACHABLE
    assert remote.sshd.fingerprint in caught.value.fix
    assert remote.is_base()


def test_a_rebuilt_host_key_is_refused_until_it_is_pinned(remote: Remote) -> None:
    old = remote.sshd.fingerprint
    carrier = remote.carrier()
    remote.sshd.stop()
    remote.sshd.rebuild()
    remote.sshd.start()

    with pytest.raises(Unreachable) as caught:
        carrier.deliver(remote.bundle(), Request(verb=Verb.DEPLOY))

    assert old in caught.value.why
    assert remote.sshd.fingerprint in caught.value.why
    assert f"[127.0.0.1]:{remote.sshd.port}" in caught.value.why
    assert remote.is_base()
    assert [found.exit for found in remote.deploy()] == [Exit.OK, Exit.OK]


def test_a_key_that_is_not_let_in_is_told_with_what_was_tried(remote: Remote) -> None:
    (remote.sshd.folder / "user.pub").write_text("")

    with pytest.raises(Unreachable, match="did not let us in") as caught:
        remote.deploy()

    assert str(remote.sshd.user_key) in caught.value.why


def test_nobody_there_is_told_with_the_address(remote: Remote) -> None:
    remote.stop()

    with pytest.raises(Unreachable, match="cannot reach") as caught:
        remote.deploy()

    assert str(remote.sshd.port) in caught.value.why


def test_a_jump_host_is_travelled_and_its_key_is_pinned_too(remote: Remote, tmp_path: Path) -> None:
    gate = Sshd(tmp_path / "gate").start()
    shutil.copy(gate.user_key, tmp_path / "gate.key")
    try:
        remote.folder.joinpath("more").write_text(gate.config_of("gate"))
        carrier = remote.carrier("ProxyJump gate", f"Include {remote.folder}/more")
        pins = {**carrier.pins, "gate": {gate.fingerprint: "pinned"}}

        said = replace(carrier, pins=pins).deliver(remote.bundle(), Request(verb=Verb.DEPLOY))
        with pytest.raises(Unreachable) as caught:
            carrier.deliver(remote.bundle(), Request(verb=Verb.CHECK))
    finally:
        gate.stop()

    assert said.exit == Exit.OK
    assert "./inv hosts.trust -a gate --fingerprint" in caught.value.fix
    assert gate.fingerprint in caught.value.fix


def test_a_proxy_command_is_the_way(remote: Remote) -> None:
    sshd = remote.sshd
    command = (
        f"ProxyCommand ssh -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        f"-o LogLevel=ERROR -i {sshd.user_key} -p {sshd.port} -W %h:%p 127.0.0.1"
    )

    said = remote.carrier(command).deliver(remote.bundle(), Request(verb=Verb.DEPLOY))

    assert said.exit == Exit.OK


def test_a_proxy_command_that_ends_is_no_hang(remote: Remote) -> None:
    start = time.monotonic()

    with pytest.raises(Unreachable):
        remote.carrier("ProxyCommand true").deliver(remote.bundle(), Request(verb=Verb.CHECK))

    assert time.monotonic() - start < 15


def test_a_silent_ssh_agent_does_not_hang_the_login(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "agent"))
        dead.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        start = time.monotonic()

        assert remote.ask(Verb.CHECK).exit == Exit.DIFFERS

    assert time.monotonic() - start < 8


def test_connections_dropped_at_the_banner_are_tried_again(tmp_path: Path) -> None:
    for remote in started(tmp_path, PLAIN, "MaxStartups 1:100:1", "LoginGraceTime 20"):
        time.sleep(0.5)  # the look whether the server is up counts as a start-up, too
        with socket.create_connection(("127.0.0.1", remote.sshd.port)) as first:
            assert first.recv(4) == b"SSH-"
            with pytest.raises(Unreachable, match="drops connections") as caught:
                remote.ask(Verb.CHECK)
        assert "MaxStartups" in caught.value.fix

        assert remote.ask(Verb.CHECK).exit == Exit.DIFFERS


def test_a_second_operator_is_told_who_is_at_work_and_can_wait(remote: Remote) -> None:
    bundle = remote.bundle()
    tree = TreeWriter(str(remote.target.root), SITE)
    lock = Lock(tree, wait=0)
    lock.sign(tree, {"operator": "somebody@else", "since": "2026-01-31T03:00:00Z", "pid": 77})

    refused = remote.deploy(bundle)
    threading.Timer(1.5, lock.release).start()
    waited = remote.carrier().deliver_in_turn(
        bundle, [Request(verb=Verb.DEPLOY, wait=30)], tell=remote.lines.append
    )

    assert [found.exit for found in refused] == [Exit.REFUSED]
    assert refused[0].error is not None
    assert "another deploy is at work" in refused[0].error.what
    assert "operator somebody@else" in refused[0].error.why
    assert "since 2026-01-31T03:00:00Z" in refused[0].error.why
    assert waited[0].exit == Exit.OK
    assert remote.is_new()


@pytest.mark.slow
def test_after_login_one_exec_does_it_and_contents_cost_one_round_trip_more(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = remote.bundle()
    logged_in = []

    def turns() -> int:
        """How often the line's direction turned in one deploy, the login left out."""
        with Relay(remote.sshd.port, delay=0.15) as relay:
            remote.port = relay.port
            start = Line.start

            def noting(self: Line, *command: Any) -> Stream:
                logged_in.append(relay.turns)
                return start(self, *command)

            monkeypatch.setattr(Line, "start", noting)
            assert remote.deploy(bundle)[-1].exit == Exit.OK
            monkeypatch.undo()
            # The farewell is still on its way, and nobody waits for it.
            return relay.turns - logged_in[-1]

    first = turns()
    again = turns()
    shutil.rmtree(remote.target.root)
    remote.target.make(BASE_FILES)
    rebuilt = turns()
    shutil.rmtree(remote.state)
    lost = turns()

    # A channel is opened, then one exec brings everything and is answered.
    assert again == rebuilt == 2
    # A program that is too long for the command waits for the server to take it; then contents.
    assert first == 4
    # The parts of the job are asked for.
    assert lost == 3


def test_compiled_code_of_the_store_is_run_only_by_the_digest_that_was_told(
    remote: Remote,
) -> None:
    bundle = remote.bundle()
    remote.deploy(bundle)
    [memo] = (remote.folder / "memory").iterdir()
    [sha256] = json.loads(memo.read_text())["codes"].values()
    stored = remote.state / "blobs" / sha256
    mark = remote.folder / "ran"
    evil = compile(f"open({str(mark)!r}, 'w')", "evil", "exec")
    names = [path.stem for path in AGENT.glob("*.py")]
    stored.write_bytes(marshal.dumps(dict.fromkeys(names, evil)))

    said = remote.deploy(bundle)

    assert said[-1].exit == Exit.OK
    assert not mark.exists()
