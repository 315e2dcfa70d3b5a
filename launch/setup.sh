#!/usr/bin/env bash
# Makes or reuses .venv with the pinned requirements and this package; quick when nothing changed.
#
#   bash launch/setup.sh [--dev]        --dev: also what launch/test.sh needs
#
# COMPPO_PYTHON      interpreter for a new .venv (default: the first of python3.11 … python3 that is ≥ 3.11)
# COMPPO_TORCH_SPEC  arguments for pip that install the pinned torch, where the default finds the wrong build: for
#                    example "torch==2.13.0+cpu --extra-index-url <an index that has that build>"
# COMPPO_BUILD       cpu, cuda or off: which compiled ops to build, in place of what setup.py chooses
# COMPPO_EXTRA       name of a further requirements/<name>.txt, such as cluster
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*"; }
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
pip_install() { .venv/bin/python -m pip --disable-pip-version-check install -qq "$@"; }

find_python() {
    for candidate in ${COMPPO_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python ≥ 3.11 found; install one or name it in COMPPO_PYTHON" >&2
    return 1
}

# once NAME FILE... -- COMMAND...: run the command unless it succeeded before with the same files, words and folder.
once() {
    local stamp=".venv/stamps/$1" state files=()
    shift
    while [ "$1" != -- ]; do
        files+=("$1")
        shift
    done
    shift
    state="$(cat "${files[@]}" | cksum) $(.venv/bin/python -V) $PWD $*"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
        "$@"
        mkdir -p .venv/stamps
        echo "$state" >"$stamp"
    fi
}

# Without a GPU the CPU build is wanted: several gigabytes less than the default build for Linux.
install_torch() {
    local pinned
    pinned=$(grep '^torch==' requirements/cpu.txt)
    if [ -n "$1" ]; then
        pip_install -c requirements/cpu.txt $1 # several words
    elif [ -n "$(command -v nvidia-smi)" ]; then
        pip_install -c requirements/cpu.txt "$pinned"
    elif ! pip_install -c requirements/cpu.txt "$pinned+cpu" 2>/dev/null; then
        say "the package index has no CPU build of $pinned: installing its default build (see COMPPO_TORCH_SPEC)"
        pip_install -c requirements/cpu.txt "$pinned"
    fi
}

install_base() {
    say "installing requirements/cpu.txt (about a minute)"
    install_torch "$1"
    pip_install --no-deps --ignore-requires-python -r requirements/cpu.txt
}

install_extra() {
    say "installing requirements/$1.txt"
    pip_install --no-build-isolation -c requirements/cpu.txt -r "requirements/$1.txt"
}

build_package() {
    say "building the package and its compiled ops (half a minute; several with CUDA kernels)"
    pip_install --no-deps --no-build-isolation -e .
}

if ! recent .venv/bin/python; then
    python=$(find_python)
    say "creating .venv with $python"
    "$python" -m venv --clear .venv
fi
once base requirements/cpu.txt -- install_base "${COMPPO_TORCH_SPEC:-}"
if [ -n "${COMPPO_EXTRA:-}" ]; then
    once "$COMPPO_EXTRA" requirements/cpu.txt "requirements/$COMPPO_EXTRA.txt" -- install_extra "$COMPPO_EXTRA"
fi
if [ "${1:-}" = --dev ]; then
    once dev requirements/dev.txt -- pip_install --no-deps -r requirements/dev.txt
fi
once package pyproject.toml setup.py CMakeLists.txt $(find csrc -type f | LC_ALL=C sort) -- build_package "${COMPPO_BUILD:-}"
