#!/bin/sh
# A Docker engine and a runnable base image for the tests of images and containers.
#
#   docker.sh start    install what is missing, start dockerd if none answers, make the base image,
#                      lay a newer engine into a folder, which tests start for themselves
#   docker.sh stop     stop the dockerd that `start` started, and no other
#   docker.sh status   say what is there; 0 when the engine answers and the base is in it
#
# No registry is asked: the base is made by debootstrap, so that it holds a full Python and an sshd.
# What is made is kept in DCU_TEST_CACHE (default: ~/.cache/dcu-bundle), for every checkout of this machine, as the
# engine is; what tells of the daemon that this checkout started lies in out/cache/docker.
# shellcheck disable=SC2016  # the single-quoted scripts get their values as arguments
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
state=${DCU_TEST_DOCKER:-$here/../../out/cache/docker}
suite=bookworm
image=dcu-test/base:1
packages=python3,openssh-server,strace,procps,sudo
cache=${DCU_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dcu-bundle}/docker
tar=$cache/base-1.tar
newer=$cache/newer # the root of a Debian whose engine can keep images in containerd

say() { printf 'docker: %s\n' "$*" >&2; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

answers() { timeout 20 docker info >/dev/null 2>&1; }

install_packages() {
    missing=
    command -v dockerd >/dev/null 2>&1 || missing="$missing docker.io"
    command -v debootstrap >/dev/null 2>&1 || missing="$missing debootstrap"
    command -v shellcheck >/dev/null 2>&1 || missing="$missing shellcheck"
    command -v strace >/dev/null 2>&1 || missing="$missing strace"
    command -v docker-registry >/dev/null 2>&1 || missing="$missing docker-registry"
    command -v podman >/dev/null 2>&1 || missing="$missing podman"
    command -v buildah >/dev/null 2>&1 || missing="$missing buildah"
    [ -n "$missing" ] || return 0
    say "installing$missing"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 update >"$state/apt.log" 2>&1 || true
    # shellcheck disable=SC2086  # a list of package names, one word each
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600 install --no-install-recommends $missing \
        >>"$state/apt.log" 2>&1 || { tail -n 5 "$state/apt.log" >&2; return 1; }
}

# The daemon runs in its own session with its streams in a file: it outlives this script and the
# terminal, and is found again by pid and start time.
start_daemon() {
    answers && return 0
    say "starting dockerd"
    as_root sh -c 'setsid nohup dockerd >"$1/dockerd.log" 2>&1 </dev/null & echo $! >"$1/dockerd.pid"' sh "$state"
    ticks_of "$(cat "$state/dockerd.pid")" >"$state/dockerd.ticks"
    tries=0
    until answers; do
        tries=$((tries + 1))
        if [ "$tries" -gt 60 ] || ! kill -0 "$(cat "$state/dockerd.pid")" 2>/dev/null; then
            say "dockerd did not come up; the end of $state/dockerd.log:"
            tail -n 5 "$state/dockerd.log" >&2
            return 1
        fi
        sleep 0.5
    done
}

# Field 22 of /proc/PID/stat, counted after the last ')' because a name may hold blanks.
ticks_of() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

make_base() {
    ! docker image inspect "$image" >/dev/null 2>&1 || [ ! -f "$tar" ] || return 0
    if [ ! -f "$tar" ]; then
        say "making the base image with debootstrap (about a minute)"
        as_root rm -rf "$cache/rootfs"
        as_root debootstrap --variant=minbase --include="$packages" "$suite" "$cache/rootfs" >"$state/debootstrap.log" 2>&1 ||
            { tail -n 5 "$state/debootstrap.log" >&2; return 1; }
        as_root sh -c 'cd "$1" && rm -rf var/cache/apt/*.bin var/cache/apt/archives/*.deb var/lib/apt/lists/* etc/ssh/ssh_host_* &&
            mkdir -p run/sshd usr/local/lib/python3.11/dist-packages' sh "$cache/rootfs"
        as_root tar -C "$cache/rootfs" -cf "$tar.part" .
        mv "$tar.part" "$tar"
        as_root rm -rf "$cache/rootfs"
    fi
    say "importing $image"
    docker import --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        --change 'CMD ["bash"]' "$tar" "$image" >/dev/null
}

# Its tests say that it is missing; the others do not need it.
lay_newer() {
    [ ! -x "$newer/usr/sbin/dockerd" ] || return 0
    say "laying a newer engine with debootstrap (about a minute)"
    as_root rm -rf "$newer.part"
    if as_root debootstrap --variant=minbase --include=docker.io trixie "$newer.part" >"$state/newer.log" 2>&1; then
        as_root mv "$newer.part" "$newer"
    else
        tail -n 5 "$state/newer.log" >&2
        say "there is no newer engine"
    fi
}

start() {
    mkdir -p "$state" "$cache"
    exec 9>"$cache/lock"
    flock -w 900 9
    install_packages
    start_daemon 9>&-
    make_base
    lay_newer
}

stop() {
    [ -f "$state/dockerd.pid" ] || { say "no dockerd of ours"; return 0; }
    pid=$(cat "$state/dockerd.pid")
    if [ -n "$pid" ] && [ "$(ticks_of "$pid")" = "$(cat "$state/dockerd.ticks")" ]; then
        say "stopping dockerd ($pid)"
        as_root kill "$pid"
        tries=0
        while kill -0 "$pid" 2>/dev/null && [ "$tries" -lt 60 ]; do tries=$((tries + 1)); sleep 0.5; done
    fi
    rm -f "$state/dockerd.pid" "$state/dockerd.ticks"
}

status() {
    answers || { say "no engine answers"; return 1; }
    docker image inspect "$image" >/dev/null 2>&1 || { say "the base $image is missing"; return 1; }
    say "the engine answers and holds $image"
}

case ${1:-} in
start) start ;;
stop) stop ;;
status) status ;;
*)
    say "usage: docker.sh start|stop|status"
    exit 2
    ;;
esac
