#!/bin/sh
# Install a real HIP toolchain and a CPU build of PyTorch, for the tests of area "kernels".
#
# Debian's clang makes real gfx906 code objects, and CMake's HIP language only wants them below one
# prefix. So this lays out such a prefix, in the shape that DTK has: a stand-in for its folder, not
# for its compiler. A second call finds all and does nothing.
#
#   kernels.sh start    install and lay out what is missing; print the two folders
#   kernels.sh status   0 when all is there
#
# DCU_TEST_CACHE names the folder that holds both (default: ~/.cache/dcu-bundle). Nothing keeps running.
set -eu

cache=${DCU_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dcu-bundle}
prefix=$cache/toolchain
venv=$cache/kernels-venv
hip_version=5.2.21153
torch=torch==2.13.0
packages='hipcc libamdhip64-dev rocm-device-libs libamd-comgr-dev libhsa-runtime-dev
          clang-15 lld-15 ccache ninja-build cmake gcc g++ sshfs openssh-sftp-server'

say() { printf 'provision kernels: %s\n' "$*" >&2; }

install_packages() {
    missing=
    for package in $packages; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' ||
            missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    say "installing$missing"
    sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086  # a list of words is meant
    $sudo apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends $missing >&2 || {
        $sudo apt-get -o DPkg::Lock::Timeout=300 update -qq >&2
        $sudo apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends $missing >&2
    }
}

link() { # link TARGET NAME
    mkdir -p "$(dirname "$2")"
    ln -sfn "$1" "$2"
}

copy_cmake_package() { # its files compute their prefix from where they lie; name ours instead
    mkdir -p "$new/lib/cmake/$2"
    for file in "$1/$2"/*.cmake; do
        sed -e "s|^\( *\)get_filename_component(_IMPORT_PREFIX .*|\1set(_IMPORT_PREFIX \"$prefix\")|" \
            -e "s|^\( *\)set(_IMPORT_PREFIX \"/usr.*|\1set(_IMPORT_PREFIX \"$prefix\")|" \
            -e "s|^\( *\)get_filename_component(PACKAGE_PREFIX_DIR .*|\1set(PACKAGE_PREFIX_DIR \"$prefix\")|" \
            "$file" >"$new/lib/cmake/$2/$(basename "$file")"
    done
}

make_prefix() {
    new=$prefix.new
    libs=/usr/lib/x86_64-linux-gnu
    rm -rf "$new"
    mkdir -p "$new/llvm/bin" "$new/llvm/lib" "$new/bin" "$new/.info"
    for name in hip hsa amd_comgr.h; do
        link "/usr/include/$name" "$new/include/$name"
    done
    for file in "$libs"/libamdhip64* "$libs"/libamd_comgr* "$libs"/libhsa-runtime64*; do
        link "$file" "$new/lib/x86_64-linux-gnu/$(basename "$file")"
    done
    # A copy and not a link: a test changes one byte of it, in a prefix of its own.
    mkdir -p "$new/amdgcn"
    cp -R "$libs/amdgcn/bitcode" "$new/amdgcn/bitcode"
    for name in hip hip-lang amd_comgr hsa-runtime64; do
        copy_cmake_package "$libs/cmake" "$name"
    done
    copy_cmake_package /usr/lib/cmake AMDDeviceLibs
    link /usr/lib/llvm-15/lib/clang "$new/llvm/lib/clang"
    cat >"$new/llvm/bin/clang++" <<EOF
#!/bin/sh
exec /usr/bin/clang++-15 --rocm-path=$prefix --hip-version=$hip_version \\
    --hip-device-lib-path=$prefix/amdgcn/bitcode "\$@"
EOF
    chmod 755 "$new/llvm/bin/clang++"
    cat >"$new/env.sh" <<EOF
export ROCM_PATH=$prefix
export HIP_PATH=$prefix
export PATH=$prefix/bin:$prefix/llvm/bin:\$PATH
export LD_LIBRARY_PATH=$prefix/lib/x86_64-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export CMAKE_PREFIX_PATH=$prefix/lib/cmake\${CMAKE_PREFIX_PATH:+:\$CMAKE_PREFIX_PATH}
EOF
    echo "stand-in-1" >"$new/.info/rocm_version"
    # This script's own digest: a changed script makes the prefix anew.
    digest "$0" >"$new/.made-by"
    rm -rf "$prefix"
    mv "$new" "$prefix"
}

digest() { sha256sum <"$1" | cut -d' ' -f1; }

# A Python that can be compiled against: a shim may name one that is not there.
find_python() {
    for python in python3.11 python3.12 python3.10 python3.13 python3 /usr/bin/python3; do
        "$python" -c 'import os, sys, sysconfig
sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13)
              and os.path.exists(sysconfig.get_path("include") + "/Python.h")))' \
            2>/dev/null && return 0
    done
    return 1
}

make_venv() {
    find_python || { packages="$packages python3-dev python3-venv"; install_packages; find_python; }
    say "making $venv with $python and $torch"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q "$torch" setuptools >&2
    "$venv/bin/python" -c 'import torch; print(torch.__version__)' >"$venv/.torch"
}

prefix_is_made() { [ "$(cat "$prefix/.made-by" 2>/dev/null)" = "$(digest "$0")" ]; }

venv_is_made() { [ -s "$venv/.torch" ] && "$venv/bin/python" -c '' 2>/dev/null; }

start() {
    mkdir -p "$cache"
    exec 9>"$cache/kernels.lock"
    flock 9
    install_packages
    prefix_is_made || make_prefix
    venv_is_made || make_venv
    printf '%s\n%s\n' "$prefix" "$venv"
}

status() {
    prefix_is_made || { say "the toolchain is not laid out"; return 1; }
    venv_is_made || { say "there is no Python with torch"; return 1; }
    for tool in ninja ccache cmake clang++-15; do
        command -v "$tool" >/dev/null || { say "$tool is not installed"; return 1; }
    done
    say "toolchain in $prefix, torch $(cat "$venv/.torch")"
}

case ${1:-} in
start) start ;;
status) status ;;
*)
    say "usage: kernels.sh start|status"
    exit 2
    ;;
esac
