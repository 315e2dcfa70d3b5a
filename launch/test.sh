#!/usr/bin/env bash
# Set-up, static checks, tests. Arguments go to pytest:
#
#   bash launch/test.sh [-k invariance ...]
#   bash launch/test.sh --sglang [...]      instead, the tests against real rollout servers; makes .venv-sglang
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh --dev
python=.venv/bin/python
if [ "${1:-}" = --sglang ]; then
    bash launch/sglang_setup.sh
    bash launch/smollm2.sh
    exec $python -m pytest tests -m sglang "${@:2}"
fi
$python -m ruff check .
$python -m ruff format --check .
$python -m pyright
$python -m pytest tests "$@"
