#!/usr/bin/env bash
# The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: builds them apart, in build/sanitize, and runs
# their tests, bad input and fuzzing included, in every instruction set of this machine. About three minutes.
#
#   bash launch/sanitize.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$PWD/.venv/bin/python
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=2 TORCHDYNAMO_DISABLE=1
package=build/sanitize/package/comppo_mcore
mkdir -p "$package"
cmake -S . -B build/sanitize -G Ninja -DCOMPPO_BUILD=cpu -DCOMPPO_SANITIZE=ON -DCOMPPO_OUTPUT="$PWD/$package" \
    -DPython_EXECUTABLE="$python"
cmake --build build/sanitize

# The package as it is, but for the libraries.
find comppo_mcore -mindepth 1 -maxdepth 1 ! -name '*.so' ! -name __pycache__ \
    -exec ln -sfn -t "$package" "$PWD/{}" \;

# pytest swallows what an aborting process prints.
report=$PWD/build/sanitize/report
rm -f "$report".*
trap 'cat "$report".* 2>/dev/null || true' EXIT
export ASAN_OPTIONS=detect_leaks=0:log_path=$report UBSAN_OPTIONS=print_stacktrace=1:log_path=$report
asan=$(c++ -print-file-name=libasan.so) ubsan=$(c++ -print-file-name=libubsan.so)
# The accuracy test compares with torch, which uses the best instruction set: it is left out.
for isa in $("$python" -c 'import torch; best = torch.backends.cpu.get_cpu_capability()
print(*["portable", "avx2", "avx512"][: {"AVX2": 2, "AVX512": 3}.get(best, 1)])'); do
    echo "sanitize: $isa"
    COMPPO_CPU_ISA=$isa LD_PRELOAD="$asan $ubsan" "$python" -m pytest -q -p no:cacheprovider \
        -o pythonpath="build/sanitize/package ." tests/test_kernels_{attention,pooling,comp_gae,bad_input}.py \
        -k "not reference and not chunked and not statistics_match_oracle" "$@"
done
