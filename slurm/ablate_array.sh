#!/bin/bash
# The runs of `fastslow ablate` as a job array: one task per run, each in OUTPUT/ARM/SEED.
#
#   sbatch --array=0-8 slurm/ablate_array.sh CONFIG --variants dense,frozen,coupled --seeds 3 --output runs/study \
#       [section.key=value ...]
#
# The array needs as many tasks as there are runs, here 3 x 3; the arguments are those of `fastslow ablate`, without
# --lr-sweep. When all have ended, the same arguments give the report: .venv/bin/fastslow ablate CONFIG --variants ...
# Runs with the same seed are paired: equal fast weights at the start, equal batches at every step. Variables as in
# slurm/pretrain_1b.sh.
#
#SBATCH --job-name=fastslow-ablate
#SBATCH --array=0-8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
if [ ! -f slurm/job.sh ]; then
    echo "error: there is no slurm/job.sh in $PWD: submit from the repository's root" >&2
    exit 2
fi
. slurm/job.sh

: "${SLURM_ARRAY_TASK_ID:?this is no job array: sbatch --array=0-8}"
[ $# -gt 0 ] || fail "arguments: CONFIG --variants V,V,... --seeds N --output DIR [section.key=value ...]"

trap : TERM USR1 USR2
choose_environment
prepare_job "${LOG_DIR:-logs/slurm}/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
# shellcheck disable=SC2154
srun --nodes=1 --ntasks=1 --ntasks-per-node=1 ${container[@]+"${container[@]}"} \
    "${fastslow[@]}" ablate "$@" --arguments-of "$SLURM_ARRAY_TASK_ID" >"$job_folder/arguments" || finish 2
mapfile -t arguments <"$job_folder/arguments"
say "run $SLURM_ARRAY_TASK_ID: ${arguments[*]: -1}"
preflight "${arguments[@]}"
status=0
run_ranks train "${arguments[@]}" || status=$?
finish "$status"
