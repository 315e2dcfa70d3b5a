#!/usr/bin/env bash
# Set-up, static checks, tests. Arguments go to pytest:
#
#   bash launch/test.sh [-k invariance ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh --dev
python=.venv/bin/python
$python -m ruff check .
$python -m ruff format --check .
$python -m pyright
$python -m pytest tests "$@"
