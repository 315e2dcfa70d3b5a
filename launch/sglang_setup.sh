#!/usr/bin/env bash
# Makes or reuses .venv-sglang, the environment of the rollout servers; quick when nothing changed.
#
#   bash launch/sglang_setup.sh
#
# With a GPU: requirements/sglang.txt. Without: requirements/sglang-cpu.txt and launch/sglang_cpu/, which stands in for
# two packages that SGLang imports when it starts and that exist with CUDA only.
#
# COMPPO_PYTHON      interpreter for a new .venv-sglang (default: python3.11, on which the CPU versions were verified)
# COMPPO_TORCH_SPEC  arguments for pip that install the pinned CPU torch, where the default finds the wrong build: for
#                    example "torch==2.13.0+cpu --extra-index-url <an index that has that build>"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-sglang
stamp=$venv/comppo-stamp
cpu_pins=requirements/sglang-cpu.txt

say() { echo "sglang setup: $*"; }
pip_install() { $venv/bin/python -m pip --disable-pip-version-check install -qq "$@"; }

# Without a GPU the CPU build is wanted: several gigabytes less than the default build for Linux.
install_cpu_torch() {
    local pinned
    pinned=$(grep '^torch==' $cpu_pins)
    if [ -n "${COMPPO_TORCH_SPEC:-}" ]; then
        pip_install -c $cpu_pins $COMPPO_TORCH_SPEC # several words
    elif ! pip_install -c $cpu_pins "$pinned+cpu" 2>/dev/null; then
        say "the package index has no CPU build of $pinned: installing its default build (see COMPPO_TORCH_SPEC)"
        pip_install -c $cpu_pins "$pinned"
    fi
}

install_cpu() {
    say "installing $cpu_pins (2.7 GB, two minutes or more)"
    install_cpu_torch
    pip_install --no-deps -r $cpu_pins
    say "installing launch/sglang_cpu in place of sgl_kernel and torchvision"
    local packages
    packages=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$packages/sgl_kernel" "$packages/torchvision"
    cp -r launch/sglang_cpu/sgl_kernel launch/sglang_cpu/torchvision "$packages/"
}

install_gpu() {
    say "installing requirements/sglang.txt (many gigabytes of CUDA packages)"
    pip_install -r requirements/sglang.txt
}

if [ -n "$(command -v nvidia-smi)" ]; then
    kind=gpu sources=requirements/sglang.txt
else
    kind=cpu sources="$cpu_pins $(find launch/sglang_cpu -name '*.py' | LC_ALL=C sort)"
fi
if ! $venv/bin/python -c '' 2>/dev/null; then
    python=${COMPPO_PYTHON:-python3.11}
    if ! command -v "$python" >/dev/null; then
        echo "sglang setup: $python not found; install it or name another interpreter in COMPPO_PYTHON" >&2
        exit 1
    fi
    say "creating $venv with $python"
    "$python" -m venv --clear $venv
fi
state="$kind $(cat $sources | cksum) $($venv/bin/python -V) $PWD ${COMPPO_TORCH_SPEC:-}"
if [ "$(cat $stamp 2>/dev/null)" != "$state" ]; then
    install_$kind
    echo "$state" >$stamp
fi
say "$venv is ready: sglang $($venv/bin/python -c 'import importlib.metadata as m; print(m.version("sglang"))') ($kind)"
