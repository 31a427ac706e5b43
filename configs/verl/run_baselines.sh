#!/usr/bin/env bash
# Train with verl once per baseline:  RUN_BASELINES=vanilla,grpo_lp,dca configs/verl/run_baselines.sh OVERRIDES...
# Needs verl and this package in one environment, and the data of `retrain data prepare`. Overrides are verl's own:
#   actor_rollout_ref.model.path=Qwen/Qwen3-1.7B trainer.n_gpus_per_node=8 data.train_batch_size=128
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export VERL_USE_EXTERNAL_MODULES=retrain.adapters.verl
IFS=, read -ra modes <<< "${RUN_BASELINES:-vanilla,grpo_lp,dca}"
for mode in "${modes[@]}"; do
    [ -f "$here/$mode.yaml" ] || { echo "no baseline $mode in $here" >&2; exit 2; }
done
for mode in "${modes[@]}"; do
    echo "== $mode"
    ADV_MODE=$mode "${PYTHON:-python}" -m verl.trainer.main_ppo --config-dir "$here" --config-name "$mode" "$@"
done
