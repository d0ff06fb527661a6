#!/usr/bin/env bash
# Ingestion on one node: every core downloads, decodes and writes.
#
#   RECIPE=jobs/recipes/download/cc3m.yaml OUTPUT=/data/cc3m jobs/cluster/download-one-node.sh source.table=/data/cc3m.tsv
#
# Run the same command again after an interruption. DRY_RUN=1 prints the commands instead of running them.
# For a large list, the most important thing is a local DNS resolver (knot or unbound, not the cloud's): check the reasons
# "dns" and "timeout" in the report.
set -euo pipefail
: "${RECIPE:?set RECIPE to a file of jobs/recipes/download}" "${OUTPUT:?set OUTPUT to the folder of the data set}"
run() { if [[ -n "${DRY_RUN:-}" ]]; then echo "$*"; else "$@"; fi; }

run neuclip download --recipe "$RECIPE" "output=$OUTPUT" \
  "fetch.processes=${PROCESSES:-$(nproc)}" "fetch.threads=${THREADS:-64}" "$@"
run neuclip download --recipe "$RECIPE" "output=$OUTPUT" \
  "fetch.processes=${PROCESSES:-$(nproc)}" "fetch.threads=${THREADS:-64}" --retry-failed "$@"
run neuclip verify "$OUTPUT"
