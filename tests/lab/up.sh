#!/bin/bash
# A real SLURM on this machine: up.sh FOLDER NODES FIRST_PORT [accounting]
#
# munged, slurmctld, and one slurmd for each virtual node n1, n2, ... in namespaces of its own (host name, mounts,
# processes), at 127.0.1.1, 127.0.1.2, ... Everything lies in FOLDER, process ids in FOLDER/pids; down.sh ends exactly
# these. With "accounting" also MariaDB and slurmdbd, so that sacct answers. Needs root; packages munge, slurmctld, slurmd,
# slurm-client, and for accounting slurmdbd, mariadb-server. Then: export SLURM_CONF=FOLDER/etc/slurm.conf
set -euo pipefail
lab=$1 nodes=$2 base=$3 accounting=${4:-}
cpus=2 gpus=2
here=$(cd "$(dirname "$0")" && pwd)

die() {
    echo "the lab did not come up: $*" >&2
    tail -n 15 "$lab"/log/* >&2 || true
    "$here/down.sh" "$lab" >/dev/null 2>&1 || true
    exit 1
}

# start NAME COMMAND...: in a session of its own, with nothing of ours held open.
start() {
    local name=$1
    shift
    setsid "$@" </dev/null >>"$lab/log/$name.out" 2>&1 &
    echo $! >"$lab/pids/$name"
}

# until_true TENTHS NAME COMMAND...: wait for the command to succeed, as long as the process NAME is alive.
until_true() {
    local tries=$1 name=$2
    shift 2
    for _ in $(seq "$tries"); do
        "$@" >/dev/null 2>&1 && return
        kill -0 "$(cat "$lab/pids/$name")" 2>/dev/null || die "$name has ended"
        sleep 0.1
    done
    die "$name does not answer"
}

mkdir -p "$lab"/{etc,state,log,run,pids,spool}
chmod 755 "$lab" "$lab"/*
export SLURM_CONF=$lab/etc/slurm.conf

if [ -n "$accounting" ]; then
    accounting_lines="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((base + 19))
AccountingStoragePass=$lab/run/munge.sock
JobAcctGatherType=jobacct_gather/linux"
else
    accounting_lines="AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none"
fi
# cred_expire: by default a job that was queued again waits two minutes. SlurmdTimeout: a node
# counts as down after so many seconds; on clusters it is minutes.
cat >"$SLURM_CONF" <<C
ClusterName=lab
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$((base + 17))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$lab/run/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPidFile=$lab/run/slurmctld.pid
SlurmdPidFile=$lab/run/slurmd.%n.pid
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd.%n.log
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=20
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
InactiveLimit=0
KillWait=5
UnkillableStepTimeout=30
MinJobAge=600
CompleteWait=0
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,requeue_delay=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
$accounting_lines
$(for i in $(seq "$nodes"); do
    echo "NodeName=n$i NodeAddr=127.0.1.$i Port=$((base + 100 + i)) CPUs=$cpus RealMemory=4000 Gres=gpu:$gpus State=UNKNOWN"
done)
PartitionName=main Nodes=ALL Default=YES DefaultTime=30 MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=low Nodes=ALL DefaultTime=30 MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 State=UP
PartitionName=high Nodes=ALL DefaultTime=30 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
C
# A GPU must be a device: these are copies of /dev/null.
for gpu in $(seq 0 $((gpus - 1))); do mknod "$lab/run/gpu$gpu" c 1 3; done
echo "NodeName=n[1-$nodes] Name=gpu File=$lab/run/gpu[0-$((gpus - 1))]" >"$lab/etc/gres.conf"
{
    echo "127.0.0.1 localhost $(hostname)"
    for i in $(seq "$nodes"); do echo "127.0.1.$i n$i"; done
} >"$lab/etc/hosts"
sed '/^hosts:/d' /etc/nsswitch.conf >"$lab/etc/nsswitch.conf"
echo "hosts: files" >>"$lab/etc/nsswitch.conf" # no DNS: look-ups of these names would only time out

head -c 128 /dev/urandom >"$lab/etc/munge.key"
chmod 600 "$lab/etc/munge.key"
start munged munged --foreground --key-file="$lab/etc/munge.key" --socket="$lab/run/munge.sock" \
    --pid-file="$lab/run/munged.pid" --log-file="$lab/log/munged.log" --seed-file="$lab/run/munged.seed"
until_true 100 munged munge -n -S "$lab/run/munge.sock"

if [ -n "$accounting" ]; then
    mkdir -p "$lab/db" "$lab/run/db"
    chown mysql "$lab/db" "$lab/run/db"
    mariadb-install-db --no-defaults --user=mysql --datadir="$lab/db" --auth-root-authentication-method=socket \
        --skip-test-db >"$lab/log/install-db.out" 2>&1 || die "mariadb-install-db"
    start mariadbd mariadbd --no-defaults --user=mysql --datadir="$lab/db" --socket="$lab/run/db/s.sock" \
        --pid-file="$lab/run/db/pid" --skip-networking --innodb-buffer-pool-size=64M --innodb-log-file-size=16M \
        --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 --skip-log-bin
    until_true 300 mariadbd mariadb-admin --no-defaults -S "$lab/run/db/s.sock" ping
    mariadb --no-defaults -S "$lab/run/db/s.sock" -e "create database slurm_acct_db;
        create user slurm@localhost identified by 'slurm'; grant all on slurm_acct_db.* to slurm@localhost"
    cat >"$lab/etc/slurmdbd.conf" <<C
AuthType=auth/munge
AuthInfo=socket=$lab/run/munge.sock
DbdHost=$(hostname -s)
DbdAddr=127.0.0.1
DbdPort=$((base + 19))
SlurmUser=root
LogFile=$lab/log/slurmdbd.log
PidFile=$lab/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CommitDelay=0
C
    chmod 600 "$lab/etc/slurmdbd.conf"
    # The client library takes the socket of "localhost" from this variable.
    MYSQL_UNIX_PORT=$lab/run/db/s.sock start slurmdbd slurmdbd -D
    until_true 300 slurmdbd sacctmgr -n show cluster
    sacctmgr -i add cluster lab >/dev/null 2>&1 || true
fi

start slurmctld slurmctld -D -f "$SLURM_CONF"
controller_is_up() { scontrol ping | grep -q UP; }
until_true 200 slurmctld controller_is_up

for i in $(seq "$nodes"); do "$here/node.sh" "$lab" "n$i"; done
nodes_are_up() { [ "$(sinfo -h -N -p main -o %T | grep -cE '^(idle|mixed|allocated)$')" = "$nodes" ]; }
until_true 300 slurmctld nodes_are_up
