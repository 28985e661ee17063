"""The tab key in bash: tasks and flags of the very inv that is typed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from deploy.layout import HERE

BASH = shutil.which("bash")
ASK = """
eval "$(./inv completion)"
how=$(complete -p inv) || exit 1
for line in "./inv depl" "./inv deploy --wor" "./inv hosts." "./inv deploy -n ti"; do
    COMP_WORDS=($line)
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _inv_complete ./inv "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "$line => ${COMPREPLY[*]}"
done
"""


@pytest.mark.slow
@pytest.mark.skipif(BASH is None, reason="bash is what is completed in, and there is none")
def test_bash_completes_tasks_and_flags() -> None:
    done = subprocess.run(
        [str(BASH), "--norc", "-c", ASK],
        cwd=HERE.top,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = dict(line.split(" => ") for line in done.stdout.splitlines() if " => " in line)
    assert done.returncode == 0, done.stderr
    assert said["./inv depl"] == "deploy"
    assert said["./inv deploy --wor"] == "--worktree"
    assert set(said["./inv hosts."].split()) >= {"hosts.status", "hosts.trust"}
    assert said["./inv deploy -n ti"] == "tiny"
