#!/bin/bash
# One task of srun: rank.sh MARK COMMAND...
#
# A command that ends with status 75, "start me again", leaves the file MARK and ends well here. With the status itself
# srun would take the first rank that has saved for one that failed, and kill those that are still at it.
#
# Where SLURM tracks processes by cgroup it signals this shell only, elsewhere the command as well: the signals are
# handed on, and hearing one twice does no harm. An interrupt is handed on as a request to stop, since two of them in a
# row mean "at once".

mark=$1
shift
"$@" &
child=$!
heard=
for name in TERM USR1 USR2; do
    # shellcheck disable=SC2064
    trap "heard=yes; kill -$name $child 2>/dev/null" $name
done
trap 'heard=yes; kill -TERM $child 2>/dev/null' INT
while :; do
    heard=
    wait $child
    status=$?
    [ -n "$heard" ] || break
done
if [ "$status" -eq 75 ]; then
    : >"$mark"
    status=0
fi
exit "$status"
