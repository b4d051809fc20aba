#!/bin/bash
# Starts one virtual node of the lab in FOLDER, also one that was killed: node.sh FOLDER NAME
# Whoever kills the process in FOLDER/pids/NAME takes the node away, with everything that runs on it.
set -euo pipefail
lab=$1 name=$2
mkdir -p "$lab/spool/$name"
# shellcheck disable=SC2016
init='
hostname "$1"
mount --bind "$2/etc/hosts" /etc/hosts
mount --bind "$2/etc/nsswitch.conf" /etc/nsswitch.conf
export SLURM_CONF=$2/etc/slurm.conf
slurmd -D -N "$1" &
trap "kill -TERM $!" TERM INT
while kill -0 $!; do wait $!; done
'
setsid unshare --uts --mount --pid --fork --mount-proc --kill-child=KILL --propagation private \
    bash -c "$init" node "$name" "$lab" </dev/null >>"$lab/log/$name.out" 2>&1 &
echo $! >"$lab/pids/$name"
