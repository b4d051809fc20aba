#!/bin/bash
# Runs of every variant with every seed, as a job array: one task per run, each in OUTPUT/VARIANT/SEED.
#
#   sbatch --array=0-8 slurm/ablate_array.sh CONFIG --variants dense,frozen,coupled --seeds 3 --output runs/study \
#       [section.key=value ...]
#
# The array needs as many tasks as there are runs, here 9. Runs with the same seed are paired: equal fast weights at the
# start, equal batches at every step. Options and variables as in slurm/pretrain_1b.sh.
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

usage="CONFIG --variants V,V,... --seeds N --output DIR [section.key=value ...]"
config='' variants='' seeds='' output='' overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --variants | --seeds | --output)
            [ $# -ge 2 ] || fail "$1 needs a value; arguments: $usage"
            declare "${1#--}=$2"
            shift
            ;;
        *=*) overrides+=("$1") ;;
        *) config=$1 ;;
    esac
    shift
done
for name in config variants seeds output; do
    [ -n "${!name}" ] || fail "$name is missing; arguments: $usage"
done
[[ $seeds =~ ^[1-9][0-9]*$ ]] || fail "--seeds must be a number of seeds (got $seeds)"

IFS=, read -ra names <<<"$variants"
runs=$((${#names[@]} * seeds))
: "${SLURM_ARRAY_TASK_ID:?this is no job array: sbatch --array=0-$((runs - 1))}"
if [ "$SLURM_ARRAY_TASK_COUNT" -ne "$runs" ] || [ "$SLURM_ARRAY_TASK_MIN" -ne 0 ]; then
    fail "${#names[@]} variants x $seeds seeds are $runs runs: sbatch --array=0-$((runs - 1))"
fi
variant=${names[SLURM_ARRAY_TASK_ID / seeds]} seed=$((SLURM_ARRAY_TASK_ID % seeds))
arguments=("$config" ${overrides[@]+"${overrides[@]}"} "model.variant=$variant" "train.seed=$seed"
    "train.run_dir=$output/$variant/$seed")

trap : TERM USR1 USR2
choose_environment
prepare_job "${LOG_DIR:-logs/slurm}/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
say "variant $variant, seed $seed"
preflight "${arguments[@]}"
status=0
run_ranks train "${arguments[@]}" || status=$?
finish "$status"
