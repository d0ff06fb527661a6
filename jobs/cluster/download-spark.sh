#!/usr/bin/env bash
# Ingestion on a Spark cluster: shards are tasks of one Spark job; all executors write to a shared file system.
#
#   MASTER=spark://head:7077 RECIPE=jobs/recipes/download/datacomp.yaml OUTPUT=/shared/pool jobs/cluster/download-spark.sh
#
# Needs `pip install -c constraints.txt -e '.[scale]'` in the same place on every node
# (PYSPARK_PYTHON is the path of its python) and Java. Executor sizes etc. are set in your spark-defaults.conf.
# DRY_RUN=1 prints the command.
set -euo pipefail
: "${RECIPE:?set RECIPE to a file of jobs/recipes/download}" "${OUTPUT:?set OUTPUT to a folder that all nodes see}"
: "${MASTER:?set MASTER to the Spark master, for example spark://head:7077 or yarn}"
run() { if [[ -n "${DRY_RUN:-}" ]]; then echo "$*"; else "$@"; fi; }

# Processes divide guard.host_connections among themselves: fetch.processes is the number of concurrent tasks per node.
run neuclip download --recipe "$RECIPE" "output=$OUTPUT" fetch.distributor=pyspark "fetch.master=$MASTER" \
  "fetch.processes=${CORES:-16}" "$@"
run neuclip verify "$OUTPUT"
