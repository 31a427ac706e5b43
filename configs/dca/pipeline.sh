#!/usr/bin/env bash
# Prepare data, train once per advantage, score the runs: `make dca-pipeline`. Environment variables, with defaults:
#   DATA_DIR      data/processed   where data are written and read
#   TRAIN_SIZE    200              training problems at most
#   VAL_SIZE      50               validation problems at most
#   BUILTIN_ONLY  0                1: sums and the built-in model, no download
#   QUICK         0                with BUILTIN_ONLY, 1: a short warm start and three steps, to try the commands in seconds
#   USE_MATH      0                1: GSM8K and MATH 1:2 instead of GSM8K alone
#   RESULTS_FILE                   set: only score this file (JSON lines: predictions, lengths, ground_truth)
#   MODES         vanilla,dca      advantages to compare; the first is the base of the accuracy-efficiency score
#   RUNS_DIR      runs             where runs are written
# Arguments are passed on to `retrain train`: --set training.max_steps=50
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
retrain=${RETRAIN:-retrain}
data=${DATA_DIR:-data/processed}
runs=${RUNS_DIR:-runs}

if [ -n "${RESULTS_FILE:-}" ]; then
    exec "$retrain" score "$RESULTS_FILE" --k 1
fi

for name in BUILTIN_ONLY QUICK USE_MATH; do
    case ${!name:-0} in 0 | 1) ;; *) echo "$name=${!name}: set it to 0 or 1" >&2; exit 2 ;; esac
done

sizes=(--out "$data" --train-size "${TRAIN_SIZE:-200}" --val-size "${VAL_SIZE:-50}" --force)
if [ "${BUILTIN_ONLY:-0}" = 1 ]; then
    "$retrain" data prepare --builtin "${sizes[@]}"
    # The built-in model starts from random weights: it trains on the task that the rows are drawn from, whose held-out
    # problems are those of val.jsonl. A few hundred rows would be memorised.
    run=(--set task.name=addition --set warmup.steps=1000 --set "eval.problems=${VAL_SIZE:-50}")
    [ "${QUICK:-0}" = 1 ] && run+=(--set warmup.steps=20 --set training.max_steps=3 --set eval.problems=8)
else
    mix=gsm8k
    [ "${USE_MATH:-0}" = 1 ] && mix=gsm8k_math
    "$retrain" data prepare --source config "$here/$mix.toml" --final-answer "${sizes[@]}"
    run=(--set model.path=builtin:smollm2 --set jsonl.prompt_field=prompt --set warmup.steps=0
         --set training.max_tokens=256 --set "jsonl.path=$data/train.jsonl" --set "jsonl.heldout_path=$data/val.jsonl")
fi

IFS=, read -ra modes <<< "${MODES:-vanilla,dca}"
for mode in "${modes[@]}"; do
    "$retrain" train "$here/pipeline.toml" --plain --fresh --set "logging.name=dca-pipeline-$mode" \
        --set "logging.dir=$runs" --set "algorithm.advantage_mode=$mode" \
        "${run[@]}" "$@"
done

base="$runs/dca-pipeline-${modes[0]}"
for mode in "${modes[@]:1}"; do
    "$retrain" score "$runs/dca-pipeline-$mode" --base "$base" --k 1
done
[ ${#modes[@]} -gt 1 ] || "$retrain" score "$base" --k 1
