#!/bin/bash
# TensorBoard on a node of the cluster: sbatch slurm/tensorboard.sh [LOGDIR, default runs]
#
# The job's log says how to reach it from a desk. It listens on the node's own loopback address: whoever can log in to the
# node can reach it, nobody else.
#
#SBATCH --job-name=fastslow-tensorboard
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=4G
#SBATCH --time=12:00:00
#SBATCH --output=slurm-%j.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
venv=${VENV:-.venv} logdir=${1:-runs}
[ -x "$venv/bin/tensorboard" ] || { echo "error: no tensorboard in $venv: set VENV" >&2; exit 2; }
[ -d "$logdir" ] || { echo "error: $logdir is no folder" >&2; exit 2; }
port=$((10000 + SLURM_JOB_ID % 20000)) node=$(hostname -s)
echo "from your desk:  ssh -N -L 6006:localhost:$port -J ${SLURM_SUBMIT_HOST:-LOGIN_NODE} $node"
echo "then open        http://localhost:6006"
exec "$venv/bin/tensorboard" --logdir "$logdir" --host localhost --port "$port"
