#!/usr/bin/env bash
# Set-up, a supervised warm start, then CompPO in two processes.
#
#   bash launch/demo.sh [--gate calibrated|paper] [--seed N] [key=value ...]
#
# --gate   calibrated (default): an envelope that lets credit reach the whole answer; paper: the paper's envelope
# --seed   of data, sampling and critic (default 17)
# key=value overrides fields of configs/demo.yaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "demo: error: $*" >&2
    exit 2
}

gate=calibrated seed=17 overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --gate | --seed)
            [ $# -ge 2 ] || fail "$1 needs a value"
            declare "${1#--}=$2"
            shift
            ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0" && exit 0 ;;
        *=*) overrides+=("$1") ;;
        *) fail "$1 is not an option; give --gate, --seed or key=value" ;;
    esac
    shift
done
case $gate in
    calibrated) ;;
    paper) overrides=(gate.calibrate=null "${overrides[@]}") ;;
    *) fail "--gate is '$gate'; it must be calibrated or paper" ;;
esac
[[ $seed =~ ^[0-9]+$ ]] || fail "--seed is '$seed'; it must be a whole number"

bash launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
warm=demo-sft-$seed run=demo-$gate-$seed
rm -rf "runs/$warm" "runs/$run" # the demo starts anew

python -m comppo_mcore.data.demo_model runs/demo-model
comppo sft configs/demo_sft.yaml run.name="$warm" run.seed="$seed"
comppo train configs/demo.yaml run.name="$run" run.seed="$seed" model.path="runs/$warm/hf" "${overrides[@]}"
