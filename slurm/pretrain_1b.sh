#!/bin/bash
# Pretrain on many nodes: sbatch [SBATCH OPTIONS] slurm/pretrain_1b.sh [CONFIG] [section.key=value ...]
#
# CONFIG is configs/1b.yaml by default. Submit from the repository's root, on a file system that every node sees.
# What stands below is for 8 nodes of 8 GPUs; options on sbatch's command line override it:
#
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 slurm/pretrain_1b.sh configs/125m.yaml data.path=data/mine
#
# Variables: VENV (default .venv) or IMAGE (a container) say how Python is found, LOG_DIR (default logs/slurm) where the
# ranks' logs go. At the time limit, at a preemption and when a node fails the job saves, if it can, and queues itself
# again. docs/clusters.md has the whole story.
#
#SBATCH --job-name=fastslow
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
# The log of a job that is started again goes on in the same file.
#SBATCH --open-mode=append
# SLURM starts the job again when one of its nodes fails.
#SBATCH --requeue
# Every rank is told two minutes before the time limit (SLURM may be up to a minute early). Without "B:" before USR1, which
# would tell this script alone.
#SBATCH --signal=USR1@120

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
if [ ! -f slurm/job.sh ]; then
    echo "error: there is no slurm/job.sh in $PWD: submit from the repository's root" >&2
    exit 2
fi
. slurm/job.sh

config=configs/1b.yaml
case ${1:-} in
    *=* | "") ;;
    *) config=$1 && shift ;;
esac

# A preemption may signal this script too; it ends after the ranks have.
trap : TERM USR1 USR2
choose_environment
prepare_job "${LOG_DIR:-logs/slurm}/$SLURM_JOB_NAME-$SLURM_JOB_ID"
preflight "$config" "$@"
status=0
run_ranks train "$config" "$@" || status=$?
finish "$status"
