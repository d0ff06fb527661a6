#!/usr/bin/env bash
# Ingestion as a Slurm array: each of WORKERS nodes processes every WORKERS-th shard; all write to one shared folder.
#
#   WORKERS=16 RECIPE=jobs/recipes/download/dfn-14m.yaml OUTPUT=/shared/dfn-14m jobs/cluster/download-slurm.sh
#
# Submits three steps: prepare the URL list once; run the array (the last worker to finish writes the manifest); verify.
# If a task was stopped, submit it again. Set site-specific options (partition, account) in SBATCH_OPTIONS.
# DRY_RUN=1 prints the commands instead of submitting them.
set -euo pipefail
: "${RECIPE:?set RECIPE to a file of jobs/recipes/download}" "${OUTPUT:?set OUTPUT to a folder that all nodes see}"
WORKERS="${WORKERS:-8}"
CORES="${CORES:-16}"
read -r -a OPTIONS <<< "${SBATCH_OPTIONS:-}"
submit() {
  if [[ -n "${DRY_RUN:-}" ]]; then echo "sbatch $*" >&2; echo "0"; else sbatch --parsable "$@"; fi
}
quoted() { printf '%q ' "$@"; }

common=$(quoted --recipe "$RECIPE" "output=$OUTPUT" "fetch.workers=$WORKERS" "fetch.processes=$CORES" "$@")
plan=$(submit "${OPTIONS[@]}" --job-name=neuclip-plan --nodes=1 --time=12:00:00 \
  --wrap "neuclip download $common --plan-only")
array=$(submit "${OPTIONS[@]}" --job-name=neuclip-download --nodes=1 --cpus-per-task="$CORES" --time=48:00:00 \
  --array="0-$((WORKERS - 1))" --dependency="afterok:$plan" --requeue \
  --wrap "neuclip download $common fetch.worker=\$SLURM_ARRAY_TASK_ID")
submit "${OPTIONS[@]}" --job-name=neuclip-verify --nodes=1 --time=12:00:00 --dependency="afterok:$array" \
  --wrap "neuclip verify $(quoted "$OUTPUT")" > /dev/null
