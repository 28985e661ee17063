#!/bin/sh
# Set up what tests need beyond .venv: Debian packages and services. As root, or with sudo.
#
#   tests/provision.sh start  [NAME...]   install and start; what is there already is left alone
#   tests/provision.sh status NAME        say what is missing: 0 ready, 77 cannot be had here, else not ready
#   tests/provision.sh stop   [NAME...]   stop what `start` started, and nothing else
#
# NAME is a pytest marker (docker, sshd, hip, live) or `tools`; without one: all but live. Each has a
# script in provision.d/ that knows the same three words. One that fails does not hinder the others.
set -u

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1

script_of() {
    case $1 in
    hip) echo "$here/provision.d/kernels.sh" ;;
    *) echo "$here/provision.d/$1.sh" ;;
    esac
}

# A script may know `start` alone: it installs, and leaves nothing running.
knows() { [ "$2" = start ] || grep -q "^ *$2)" "$1"; }

do_one() { # verb, name
    script=$(script_of "$2")
    [ -f "$script" ] || return 0
    knows "$script" "$1" || return 0
    sh "$script" "$1" </dev/null
}

verb=${1:-}
case $verb in
start | stop | status) shift ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
[ $# -gt 0 ] || set -- tools docker sshd hip

worst=0
for name; do
    do_one "$verb" "$name"
    code=$?
    [ "$code" -le "$worst" ] || worst=$code
    [ "$code" = 0 ] || [ "$verb" = status ] || printf 'provision: %s: %s ended with %s\n' "$name" "$verb" "$code" >&2
done
exit "$worst"
