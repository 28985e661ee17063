#!/bin/sh
# Small Debian packages that tests of any area use: add yours to the list.
set -eu
# shellcheck source=tests/provision.d/debian.inc
. "$(dirname -- "$0")/debian.inc"

verb=${1:-start}
set -- git strace shellcheck procps e2fsprogs

case $verb in
start) install_packages "$@" ;;
status) packages_status "$@" ;;
stop) ;;
esac
