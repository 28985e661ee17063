#!/bin/sh
# OpenSSH's server, client and sftp-server. Tests start their own sshd on a high port of 127.0.0.1;
# the system's is neither needed nor started.
set -eu
# shellcheck source=tests/provision.d/debian.inc
. "$(dirname -- "$0")/debian.inc"

verb=${1:-start}
set -- openssh-server openssh-client openssh-sftp-server iproute2 sudo rsync tcsh zsh fish faketime

# Debian starts a service when it is installed; a policy-rc.d (where there is none yet) forbids it.
without_starting() {
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        # shellcheck disable=SC2016  # the inner shell's words
        as_root sh -c 'printf "#!/bin/sh\nexit 101\n" >"$1" && chmod +x "$1"' sh "$policy"
        trap 'as_root rm -f "$policy"' EXIT
    fi
    "$@"
}

case $verb in
start)
    [ -z "$(missing_of "$@")" ] || without_starting install_packages "$@"
    as_root mkdir -p /run/sshd
    ;;
status) packages_status "$@" ;;
stop) ;;
esac
