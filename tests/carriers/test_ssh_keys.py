"""Which host keys are accepted: the pins, or known_hosts where there are none, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import paramiko
import pytest

from deploy import report
from deploy.carriers.ssh_config import Hop
from deploy.carriers.ssh_keys import fingerprint, trust_of, type_order
from deploy.errors import Unreachable
from deploy.gates import Visit
from tests.carriers.sshd import make_key


@pytest.fixture
def key(tmp_path: Path) -> paramiko.PKey:
    make_key(tmp_path / "key")
    return paramiko.Ed25519Key.from_private_key_file(str(tmp_path / "key"))


def hop(*files: Path, port: int = 22, alias: str = "") -> Hop:
    return Hop(
        name="box", host="10.0.0.9", port=port, user="me", known_hosts=files, key_alias=alias
    )


def line(host: str, key: paramiko.PKey) -> str:
    return f"{host} {key.get_name()} {key.get_base64()}\n"


def test_a_fingerprint_is_what_openssh_prints(tmp_path: Path, key: paramiko.PKey) -> None:
    said = subprocess.run(
        ["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True
    )

    assert fingerprint(key) == said.stdout.split()[1]


def test_a_pinned_key_is_accepted(key: paramiko.PKey) -> None:
    trust_of("a", hop(), {fingerprint(key): "hosts.yaml"}).check(key)


def test_an_unknown_key_is_refused_with_the_command_that_pins_it(key: paramiko.PKey) -> None:
    with pytest.raises(Unreachable) as caught:
        trust_of("a", hop(port=2200), {}).check(key)

    assert "unknown" in caught.value.what
    assert "[10.0.0.9]:2200" in caught.value.why
    assert f"./inv hosts.trust -a a --fingerprint {fingerprint(key)}" in caught.value.fix


def test_a_changed_key_is_refused_with_both_fingerprints(key: paramiko.PKey) -> None:
    with pytest.raises(Unreachable) as caught:
        trust_of("a", hop(), {"SHA256:old": "pinned 2026-01-01"}).check(key)

    assert "changed" in caught.value.what
    assert "SHA256:old" in caught.value.why
    assert fingerprint(key) in caught.value.why


def test_the_table_of_all_hosts_tells_both_fingerprints_and_the_mend(key: paramiko.PKey) -> None:
    with pytest.raises(Unreachable) as caught:
        trust_of("a", hop(), {"SHA256:old": "pinned 2026-01-01"}).check(key)

    row, _, below = report.fleet_text(
        [Visit(target="ssh:a", error=caught.value), Visit(target="ssh:b", error=caught.value)]
    ).partition("\n\n")

    assert row.count("its host key changed") == 2
    first, second = below.split("\n\n")
    assert first.splitlines() == [
        f"ssh:a: {caught.value.what}",
        *str(caught.value).splitlines()[1:],
    ]
    assert second.startswith("ssh:b: refused to talk to")
    for text in ("SHA256:old", fingerprint(key), "./inv hosts.trust -a a --fingerprint"):
        assert text in first


def test_pins_decide_alone_where_there_are_any(tmp_path: Path, key: paramiko.PKey) -> None:
    known = tmp_path / "known"
    known.write_text(line("10.0.0.9", key))

    with pytest.raises(Unreachable):
        trust_of("a", hop(known), {"SHA256:other": "hosts.yaml"}).check(key)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(("port", "name"), [(22, "10.0.0.9"), (2200, "[10.0.0.9]:2200")])
def test_known_hosts_counts_where_nothing_is_pinned(
    tmp_path: Path, key: paramiko.PKey, port: int, name: str, *, hashed: bool
) -> None:
    known = tmp_path / "known"
    known.write_text(line(name, key))
    if hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, timeout=20)
        assert known.read_text().startswith("|1|")

    trust_of("a", hop(known, port=port), {}).check(key)


def test_known_hosts_is_looked_up_by_host_key_alias(tmp_path: Path, key: paramiko.PKey) -> None:
    known = tmp_path / "known"
    known.write_text(line("job-7", key))

    trust_of("a", hop(known, alias="job-7"), {}).check(key)

    with pytest.raises(Unreachable):
        trust_of("a", hop(known), {}).check(key)


def test_a_revoked_key_is_refused_though_another_line_trusts_it(
    tmp_path: Path, key: paramiko.PKey
) -> None:
    known = tmp_path / "known"
    known.write_text(line("10.0.0.9", key) + "@revoked " + line("10.0.0.9", key))

    with pytest.raises(Unreachable, match="revoked"):
        trust_of("a", hop(known), {}).check(key)


def test_a_broken_known_hosts_file_trusts_nothing(tmp_path: Path, key: paramiko.PKey) -> None:
    known = tmp_path / "known"
    known.write_bytes(b"10.0.0.9 ssh-ed25519 !!!\n\xff\xfe\n10.0.0.9\n@cert-authority * x y\n")

    with pytest.raises(Unreachable):
        trust_of("a", hop(known, tmp_path / "absent"), {}).check(key)


def test_a_host_of_which_one_key_is_known_is_asked_for_that_one(
    tmp_path: Path, key: paramiko.PKey
) -> None:
    known = tmp_path / "known"
    known.write_text(line("10.0.0.9", key).replace("ssh-ed25519", "ssh-rsa"))

    trust = trust_of("a", hop(known), {})

    offered = ["ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "ssh-rsa"]
    assert type_order(trust, offered)[:2] == ["rsa-sha2-512", "ssh-rsa"]
