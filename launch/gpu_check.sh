#!/usr/bin/env bash
# Builds the CUDA kernels and checks them.
#
#   bash launch/gpu_check.sh --compile-only   without a GPU: nvcc's and the machine code's report (launch/cuda_report.py)
#   bash launch/gpu_check.sh                  on a Hopper machine with torch ≥ 2.11: build, correctness on fresh random
#                                             data, compute-sanitizer where it is installed, timings; one table
#
# COMPPO_PYTHON  interpreter (default: .venv/bin/python if it has a CUDA build of torch, else python3)
# COMPPO_NVCC    compiler (default: nvcc on the path, else /usr/local/cuda/bin/nvcc)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "gpu_check: error: $*" >&2
    exit 2
}

has_cuda() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

compile_only=0
case ${1:-} in
    '') ;;
    --compile-only) compile_only=1 ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) fail "$1 is not an option; give --compile-only or nothing" ;;
esac
nvcc=${COMPPO_NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || fail "no nvcc at $nvcc; set COMPPO_NVCC"

python=${COMPPO_PYTHON:-.venv/bin/python}
if [ $compile_only = 1 ]; then
    [ -x "$python" ] || python=python3
    exec "$python" launch/cuda_report.py --nvcc "$nvcc"
fi

[ -n "${COMPPO_PYTHON:-}" ] || has_cuda "$python" || python=python3
has_cuda "$python" || fail "$python has no torch that sees a GPU; set COMPPO_PYTHON"
export CUDACXX=$nvcc COMPPO_BUILD=cuda PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=8
SECONDS=0
mkdir -p build/cuda
"$python" setup.py -q build_ext --inplace >build/cuda/build.log 2>&1 || {
    tail -40 build/cuda/build.log
    fail "the build failed (build/cuda/build.log)"
}
echo "gpu_check: built in $SECONDS s"

"$python" launch/gpu_correctness.py
if sanitizer=$(command -v compute-sanitizer || ls "$(dirname "$nvcc")/compute-sanitizer" 2>/dev/null); then
    for tool in memcheck racecheck synccheck; do
        timeout 60 "$sanitizer" --tool $tool --error-exitcode 1 "$python" launch/gpu_correctness.py --tiny \
            >build/cuda/$tool.log 2>&1 && echo "gpu_check: compute-sanitizer $tool: clean" || {
            status=$?
            [ $status = 124 ] && echo "gpu_check: compute-sanitizer $tool: stopped after 60 s" && continue
            tail -20 build/cuda/$tool.log
            fail "compute-sanitizer $tool found errors (build/cuda/$tool.log)"
        }
    done
else
    echo "gpu_check: compute-sanitizer is not installed: skipped"
fi
"$python" launch/gpu_timings.py
echo "gpu_check: done in $SECONDS s"
