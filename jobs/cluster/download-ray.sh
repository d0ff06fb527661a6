#!/usr/bin/env bash
# Ingestion on a Ray cluster: shards are Ray tasks of one core each; all nodes write to a shared file system.
#
#   ray start --head                       # on the head node, and `ray start --address=head:6379` on the others
#   RECIPE=jobs/recipes/download/datacomp.yaml OUTPUT=/shared/pool jobs/cluster/download-ray.sh
#
# Needs `pip install -c constraints.txt -e '.[scale]'` in the same place on every node. DRY_RUN=1 prints the command.
set -euo pipefail
: "${RECIPE:?set RECIPE to a file of jobs/recipes/download}" "${OUTPUT:?set OUTPUT to a folder that all nodes see}"
run() { if [[ -n "${DRY_RUN:-}" ]]; then echo "$*"; else "$@"; fi; }

run neuclip download --recipe "$RECIPE" "output=$OUTPUT" fetch.distributor=ray "fetch.master=${MASTER:-auto}" \
  "fetch.processes=${CORES:-16}" "$@"
run neuclip verify "$OUTPUT"
