#!/usr/bin/env bash
# Train with slime once per baseline:  RUN_BASELINES=vanilla,grpo_lp,dca configs/slime/run_baselines.sh ARGUMENTS...
# Run it in slime's directory, with this package installed beside slime. Arguments are slime's own: model, data
# (--prompt-data data/processed/train.jsonl --input-key prompt --label-key label), parallelism.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
IFS=, read -ra modes <<< "${RUN_BASELINES:-vanilla,grpo_lp,dca}"
for mode in "${modes[@]}"; do
    [ -f "$here/$mode.yaml" ] || { echo "no baseline $mode in $here" >&2; exit 2; }
done
for mode in "${modes[@]}"; do
    echo "== $mode"
    ADV_MODE=$mode "${PYTHON:-python}" "${SLIME_TRAIN:-train.py}" \
        --advantage-estimator grpo \
        --n-samples-per-prompt 8 \
        --custom-reward-post-process-path retrain.adapters.slime.compute_advantage_for_slime \
        --custom-rm-path retrain.adapters.slime.reward_for_slime \
        --custom-config-path "$here/$mode.yaml" "$@"
done
