#!/bin/sh
# An image that can compile kernels: the tests' base image, the HIP toolchain of kernels.sh and torch.
#
#   toolchain-image.sh start    make it from dcu-test/base:1 (2.5 GB, three minutes); needs docker and hip
#   toolchain-image.sh status   0 when the engine holds it
#
# Not a part of what CI sets up: its one test is skipped without it, and says so.
set -eu

image=dcu-test/toolchain:1
box=dcu-test-toolchain-$$
cache=${DCU_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dcu-bundle}
packages='hipcc libamdhip64-dev rocm-device-libs libamd-comgr-dev libhsa-runtime-dev
          clang-15 lld-15 ccache ninja-build cmake gcc g++ python3-dev'

say() { printf 'toolchain image: %s\n' "$*" >&2; }

start() {
    ! status 2>/dev/null || return 0
    say "making $image (about three minutes)"
    trap 'docker rm -f "$box" >/dev/null 2>&1 || true' EXIT
    docker run -d --network host --name "$box" dcu-test/base:1 sleep infinity >/dev/null
    # shellcheck disable=SC2086  # package names, split on purpose
    docker exec -e DEBIAN_FRONTEND=noninteractive "$box" sh -c '
        apt-get update -q && apt-get install -y -q --no-install-recommends "$@" &&
            rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb' sh $packages >&2
    # The prefix names itself by its path; torch was installed for this very version of Python.
    docker exec "$box" mkdir -p "$cache"
    docker cp "$cache/toolchain" "$box:$cache/"
    docker cp "$cache/kernels-venv/lib/python3.11/site-packages/." "$box:/usr/local/lib/python3.11/dist-packages/"
    docker exec "$box" python3 -c 'import torch'
    docker commit --change 'CMD ["bash"]' "$box" "$image" >/dev/null
}

status() {
    docker image inspect "$image" >/dev/null 2>&1 || { say "the engine holds no $image"; return 1; }
    say "the engine holds $image"
}

case ${1:-} in
start) start ;;
status) status ;;
*)
    say "usage: toolchain-image.sh start|status"
    exit 2
    ;;
esac
