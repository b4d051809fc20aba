#!/bin/bash
# Ends the lab in FOLDER: exactly the processes that it recorded, checked by what they were started with. down.sh FOLDER
lab=$1
export SLURM_CONF=$lab/etc/slurm.conf
cd "$lab/pids" || exit 0

# A zombie that nobody has reaped yet counts as gone.
alive() { grep -q '^State:[[:space:]]*[^Z]' "/proc/$1/status" 2>/dev/null; }
ours() { { tr '\0' ' ' <"/proc/$1/cmdline" | grep -qF "$lab" || tr '\0' '\n' <"/proc/$1/environ" | grep -qF "$lab/"; } 2>/dev/null; }

stop() {
    local signal=$1 name=$2 pid
    pid=$(cat "$name" 2>/dev/null) || return 0
    if alive "$pid" && ours "$pid"; then
        kill "-$signal" "$pid"
        for _ in $(seq 100); do
            alive "$pid" || break
            sleep 0.05
        done
        if alive "$pid"; then kill -KILL "$pid"; fi
    fi
    rm -f "$name"
}

# Jobs first, so that their ranks end as they would at a scancel.
if timeout 5 scancel --full --user=root >/dev/null 2>&1; then
    for _ in $(seq 60); do
        [ -n "$(timeout 3 squeue -h -t R,CG,S 2>/dev/null)" ] || break
        sleep 0.1
    done
fi
stop TERM slurmctld
# All at once: the end of a namespace takes seconds.
for node in n[0-9]*; do
    pid=$(cat "$node")
    if alive "$pid" && ours "$pid"; then kill -KILL "$pid"; fi
done
for node in n[0-9]*; do stop KILL "$node"; done
for name in slurmdbd mariadbd munged; do stop TERM "$name"; done
