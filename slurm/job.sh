# What the scripts in this folder share; they and the jobs of launchers/submit.py source it inside an allocation.
#
#   choose_environment            sets the array `fastslow`: how ranks start the command
#   prepare_job FOLDER [LOG]      checks the allocation, sets the address and the libraries' settings
#   preflight CONFIG [KEY=VALUE]  every node is looked at before any rank starts; a bad one ends the job
#   run_ranks ARGUMENT...         `fastslow ARGUMENT...` on every rank
#   finish STATUS                 ends the job: done, failed, or queued again
#
# shellcheck shell=bash

here=$(dirname "${BASH_SOURCE[0]}")
container=()

fail() {
    echo "error: $*" >&2
    exit 2
}

# One line with the time before it: the job's own log is short, and tells the story of all its starts.
say() {
    echo "$(date '+%F %T') job $SLURM_JOB_ID: $*"
}

# VENV: a virtual environment that every node sees, default .venv.
# IMAGE: a container instead. A file *.sif is run by apptainer, any other name is left to SLURM's pyxis plugin.
choose_environment() {
    if [ -z "${IMAGE:-}" ]; then
        local venv=${VENV:-.venv}
        [ -x "$venv/bin/python" ] || fail "no virtual environment in $venv: run make setup, or set VENV or IMAGE"
        fastslow=("$venv/bin/python" -m fastslow_scale.cli)
    elif [[ $IMAGE == *.sif ]]; then
        fastslow=(apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$IMAGE" python -m fastslow_scale.cli)
    else
        container=("--container-image=$IMAGE" "--container-mounts=$PWD:$PWD" "--container-workdir=$PWD")
        fastslow=(python -m fastslow_scale.cli)
    fi
}

prepare_job() {
    job_folder=$1
    rank_log=${2:-$job_folder/rank_0.log}
    start_again=$job_folder/start_again
    [ -n "${SLURM_JOB_ID:-}" ] || fail "this is no SLURM job: start it with sbatch"
    ranks=${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))}
    # SLURM writes 8(x8) where every node has eight tasks, and 8(x7),4 where one has four. Tensor-parallel groups would
    # then reach from one node to the next.
    if [[ $SLURM_TASKS_PER_NODE == *,* ]] || ((ranks % SLURM_JOB_NUM_NODES)); then
        fail "uneven allocation: $ranks tasks on $SLURM_JOB_NUM_NODES nodes; ask for --nodes and --ntasks-per-node only"
    fi
    mkdir -p "$job_folder"
    rm -f "$start_again"

    # The first node listens. The port follows from the job, so that jobs that share a node do not meet; it lies below
    # the ports that the system hands out by itself. Ranks inside a container could not ask scontrol.
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_PORT=$((10000 + (31 * SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 20000))
    export MASTER_ADDR MASTER_PORT

    # By default every rank would start a thread for each core of the node. The number of threads also decides the last
    # bits of sums on CPUs, so it must not depend on what the node happens to have.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # Kernels start in the order in which they are queued: Megatron's tensor-parallel layers overlap communication with
    # computation only then.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    # A failed or timed-out NCCL collective ends the rank instead of leaving it to wait.
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
    # NCCL is silent about what it falls back from; warnings are few and name the reason.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    # Ranks write to files here: without this their last lines would be lost in a buffer when they are killed.
    export PYTHONUNBUFFERED=1

    saved_before=$(times_saved)
    say "start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), $ranks ranks"
}

preflight() {
    local status=0
    # One task per node. The job's own --ntasks-per-node is in the environment, and would count here too.
    # shellcheck disable=SC2154
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --wait=0 \
        ${container[@]+"${container[@]}"} "$here/rank.sh" "$start_again" \
        "${fastslow[@]}" doctor --quick --ranks "$ranks" "$@" || status=$?
    if [ "$status" -ne 0 ]; then
        say "the nodes are not fit for this run (the lines above name them; sbatch --exclude leaves nodes out)"
        finish "$status"
    elif [ -e "$start_again" ]; then
        finish 0
    fi
}

# One task per GPU, not one per node with torchrun inside: SLURM then signals every rank itself, sees each one's exit
# status, gives each its log, its cores and its place, and there is no agent between that could swallow a signal.
#   --kill-on-bad-exit  a rank that fails takes the others with it, so that none waits for it
#   --wait              a rank that ended well leaves the others this many seconds
#   --cpus-per-task     since SLURM 22.05 srun does not take this from the job
#   --gpu-bind=none     each rank sees all GPUs of its node, and NCCL may use the links between them
run_ranks() {
    local status=0
    say "training; follow it with: tail -F $rank_log"
    srun --kill-on-bad-exit=1 --wait=300 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --gpu-bind=none \
        --open-mode=append --output="$job_folder/rank_%t.log" \
        ${container[@]+"${container[@]}"} "$here/rank.sh" "$start_again" "${fastslow[@]}" "$@" || status=$?
    return "$status"
}

finish() {
    local status=$1 state node silent=()
    # A job that SLURM has taken back (a preemption, a node that is known to be down) or that was cancelled is not ours to
    # queue: `scontrol requeue` would bring a cancelled one back.
    state=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z_]*')
    if [ "$state" != JobState=RUNNING ]; then
        say "SLURM has ended this start ($state)"
    elif [ "$status" -eq 0 ] && [ -e "$start_again" ]; then
        refuse_idle_starts
        queue_again "the ranks were told to stop, and ask to be started again"
    elif [ "$status" -ne 0 ]; then
        # SLURM needs minutes to find that a node is gone; until then it starts jobs there, whose steps fail.
        for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
            timeout 60 srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" --overlap true 2>/dev/null ||
                silent+=("$node")
        done
        [ "${#silent[@]}" -eq 0 ] || queue_again "no answer from ${silent[*]}"
        show_errors
        say "failed with exit status $status"
    else
        say "done"
    fi
    exit "$status"
}

# SLURM then ends this script.
queue_again() {
    say "$1"
    if [ "${part_of_chain:-no}" = yes ]; then
        say "not queued again: the next job of the chain goes on"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        say "queued again"
    fi
    exit 75
}

times_saved() {
    { grep -s '^stopped by ' "$rank_log" || true; } | wc -l
}

# A time limit that leaves no time for training would otherwise start the job for ever.
refuse_idle_starts() {
    if [ "$(times_saved)" != "$saved_before" ]; then
        rm -f "$job_folder/idle_starts"
        return
    fi
    echo "start $((${SLURM_RESTART_COUNT:-0} + 1))" >>"$job_folder/idle_starts"
    if [ "$(wc -l <"$job_folder/idle_starts")" -ge 3 ]; then
        fail "three starts in a row were stopped before the first step: see --time and --signal"
    fi
}

# What the ranks say for themselves is the cause; the last lines of the first rank are the next best.
show_errors() {
    local log errors
    errors=$(for log in "${rank_log%0*}"*; do tail -n 30 "$log" 2>/dev/null | grep -a '^error: ' || true; done)
    if [ -n "$errors" ]; then
        sort -u <<<"$errors" | head -n 20
    else
        tail -n 20 "$rank_log" 2>/dev/null || true
    fi
}
