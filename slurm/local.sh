#!/usr/bin/env bash
# slurm/local.sh - a real Slurm cluster of several nodes on one Linux machine.
#
# For trying vigpipe under srun without a cluster, and for tests/slurm: it runs
# munged, slurmctld and N slurmd daemons, one per pretend node, all bound to a
# loopback address.  There is no accounting database and nothing is confined by
# cgroups, so it also works in containers and small virtual machines.
#
#   slurm/local.sh start         install what is missing, start, wait until idle
#   slurm/local.sh [start] --hosts N   the same, with a host of slurm/hosts.sh for each of the
#                                nodes host1..hostN, and one more for slurmctld and srun (root)
#   slurm/local.sh stop          cancel the jobs, end the daemons it started
#   slurm/local.sh status        daemons, nodes and jobs (exit 0: all daemons up)
#   slurm/local.sh env           shell lines for:  eval "$(slurm/local.sh env)"
#   slurm/local.sh fail NODE     SIGKILL the node's slurmd, step daemons and tasks
#   slurm/local.sh freeze NODE   SIGSTOP the same: nothing answers, sockets stay open
#   slurm/local.sh thaw NODE     SIGCONT them again
#   slurm/local.sh wipe          stop, then delete the directory
# "start" on a running cluster is harmless; it brings a failed node back.
#
# Settings (environment):
#   SLURM_LOCAL_DIR        config, state, logs, pid files  [/tmp/vigpipe-slurm]
#   SLURM_LOCAL_NODES      number of nodes, node1..nodeN   [2]
#   SLURM_LOCAL_CPUS       CPUs claimed by each node       [8]
#   SLURM_LOCAL_MEM        MiB claimed by each node        [16000]
#   SLURM_LOCAL_PORT       slurmctld's port; nodeI uses this + I   [16817]
#   SLURM_LOCAL_REQUEUE    seconds a requeued job is held; a stock cluster: 120   [5]
#   SLURM_LOCAL_LOST       seconds of silence that make a node DOWN; stock: 300   [10]
#   SLURM_LOCAL_KILLWAIT   seconds from SIGTERM to SIGKILL; stock: 30             [5]
#   SLURM_LOCAL_GRACE      seconds a preempted job has left; stock: 0             [5]
#   SLURM_LOCAL_HOSTS=1    also put node1..nodeN in /etc/hosts (root); stop undoes it
# The requeue hold is Slurm's cred_expire, which also bounds how slowly a job may
# launch, so do not go below 5 on a loaded machine.
#
# Only installing the packages and SLURM_LOCAL_HOSTS need root.  Run as a user,
# the cluster serves that user alone.
set -euo pipefail

DIR=${SLURM_LOCAL_DIR:-/tmp/vigpipe-slurm}
NODES=${SLURM_LOCAL_NODES:-2}
CPUS=${SLURM_LOCAL_CPUS:-8}
MEM=${SLURM_LOCAL_MEM:-16000}
PORT=${SLURM_LOCAL_PORT:-16817}
REQUEUE=${SLURM_LOCAL_REQUEUE:-5}
LOST=${SLURM_LOCAL_LOST:-10}
KILLWAIT=${SLURM_LOCAL_KILLWAIT:-5}
GRACE=${SLURM_LOCAL_GRACE:-5}
CONF=$DIR/slurm.conf
MARK='# vigpipe-slurm'
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$CONF
HOSTS=$(cd "$(dirname "$0")" && pwd)/hosts.sh
export VIGPIPE_HOSTS_DIR=$DIR/hosts

say() { printf 'slurm/local.sh: %s\n' "$*"; }
die() { printf 'slurm/local.sh: %s\n' "$*" >&2; exit 1; }

# alive NAME: prints the pid in run/NAME.pid when that process is still ours.  A
# recycled pid is told apart by the program's name and by its start time, which
# "remember" notes beside the pid file.
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'; }
alive() {
    local pid start want
    { read -r pid <"$DIR/run/$1.pid"; } 2>/dev/null || return 1
    [[ $pid =~ ^[0-9]+$ && $(cat "/proc/$pid/comm" 2>/dev/null) == "${1%%-*}"* ]] || return 1
    start=$(started "$pid")
    [ -n "$start" ] || return 1  # gone, or a zombie
    if { read -r want <"$DIR/run/$1.started"; } 2>/dev/null; then [ "$start" = "$want" ] || return 1; fi
    echo "$pid"
}
not_started() {
    tail -n 20 "$DIR/log/$1.log" >&2 || true
    if tail -n 5 "$DIR/log/$1.log" | grep -q 'Address already in use'; then
        die "$1 did not start: ports $PORT to $((PORT + NODES)) are not all free; set SLURM_LOCAL_PORT"
    fi
    die "$1 did not start; its log is $DIR/log/$1.log"
}
controller() { echo "host$(($(node_names | wc -l) + 1))"; }  # the host of slurmctld
at_head() {  # what speaks to slurmctld
    if [ -d "$VIGPIPE_HOSTS_DIR" ]; then "$HOSTS" run "$(controller)" "$@"; else "$@"; fi
}
# daemon NAME HOST CMD: start a daemon, on a host if there are hosts.
daemon() {
    local name=$1 host=$2 pid child=''
    shift 2
    rm -f "$DIR/run/$name.started"
    if [ ! -d "$VIGPIPE_HOSTS_DIR" ]; then
        "$@" 9>&- >>"$DIR/log/$name.log" 2>&1 || not_started "$name"
    else  # in the foreground, as its own process id would be that of the host's namespace
        setsid "$HOSTS" run "$host" "$@" -D 9>&- </dev/null >>"$DIR/log/$name.log" 2>&1 &
        pid=$!
        disown
        until [[ $child && $(cat "/proc/$child/comm" 2>/dev/null) == "${1##*/}" ]]; do
            [ -n "$(started "$pid")" ] || not_started "$name"
            child=$(cat "/proc/$pid/task/$pid/children" 2>/dev/null | tr -d ' ') || true
            sleep 0.05
        done
        echo "$child" >"$DIR/run/$name.pid"
    fi
    remember "$name"
}
remember() {
    local pid
    for _ in $(seq 50); do
        if pid=$(alive "$1"); then started "$pid" >"$DIR/run/$1.started"; return 0; fi
        sleep 0.1
    done
    not_started "$1"
}

node_names() {  # as the running configuration has them
    sed -n 's/^NodeName=\([^ ]*\) .*/\1/p' "$CONF" 2>/dev/null
}
known_node() {
    node_names | grep -qx -- "${1:-}" || die "no such node: '${1:-}' (have: $(node_names | xargs))"
}

install_packages() {
    local p missing=() guard=''
    for p in munged slurmctld slurmd srun; do command -v "$p" >/dev/null || missing+=("$p"); done
    [ ${#missing[@]} -eq 0 ] && return
    command -v apt-get >/dev/null || die "missing ${missing[*]}: install Slurm and MUNGE (the packages slurm-wlm, munge)"
    [ "$(id -u)" = 0 ] || die "missing ${missing[*]}: run as root once, or apt-get install slurm-wlm munge"
    say "installing slurm-wlm and munge"
    # The packages must not start system-wide daemons of their own.
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        guard=/usr/sbin/policy-rc.d
        printf '#!/bin/sh\nexit 101\n' >$guard && chmod 755 $guard
    fi
    if { apt-get update && DEBIAN_FRONTEND=noninteractive \
         apt-get install -y --no-install-recommends slurm-wlm munge; } >"$DIR/log/apt.log" 2>&1
    then [ -z "$guard" ] || rm -f "$guard"
    else
        [ -z "$guard" ] || rm -f "$guard"
        tail -n 20 "$DIR/log/apt.log" >&2; die "the packages could not be installed"
    fi
    hash -r
}

write_config() {
    local host=$1 addr=$2 i node address pids=$DIR/run
    local listen='CommunicationParameters=NoInAddrAny,NoCtldInAddrAny'
    # On a host its own name is a loopback address, and a daemon's file has another id than we see.
    [ ! -d "$VIGPIPE_HOSTS_DIR" ] || listen='' pids=$DIR/run/own
    cat >"$CONF.new" <<END
ClusterName=vigpipe-local
SlurmctldHost=$host($addr)
SlurmctldPort=$PORT
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$DIR/run/munge.socket,cred_expire=$REQUEUE
# Listen on the host name's own (loopback) address, never on all addresses.
$listen
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$pids/slurmctld.pid
SlurmdPidFile=$pids/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobs.txt
MailProg=/bin/true
# No cgroups: tasks are tracked by process tree, and not bound to CPUs.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Believe the CPUs and memory declared below, not the hardware.
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=$LOST
KillWait=$KILLWAIT
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
# A job in "urgent" preempts, hence requeues, jobs in "main"; their --signal, when
# they asked for one, comes at once, and otherwise SIGTERM.
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
END
    for ((i = 1; i <= NODES; i++)); do
        node=node$i address=$addr
        if [ -d "$VIGPIPE_HOSTS_DIR" ]; then node=host$i host=host$i address=${addr%.*}.$i; fi
        printf 'NodeName=%s NodeHostname=%s NodeAddr=%s Port=%d CPUs=%d RealMemory=%d\n' \
            "$node" "$host" "$address" $((PORT + i)) "$CPUS" "$MEM"
    done >>"$CONF.new"
    cat >>"$CONF.new" <<END
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=$GRACE
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
END
    mv "$CONF.new" "$CONF"
}

hosts_without_us() { grep -v "$MARK\$" /etc/hosts; }

wait_ready() {
    local want have
    want=$(node_names | wc -l)
    for _ in $(seq 150); do
        have=$(at_head sinfo -h -N -p main -o '%N %T' 2>/dev/null |
               grep -cE ' (idle|mixed|allocated|completing)$' || true)
        [ "$have" = "$want" ] && return
        sleep 0.2
    done
    at_head sinfo -N -l >&2 || true
    die "the nodes are not all usable after 30 s; the logs are in $DIR/log"
}

start() {
    local host addr n began=$SECONDS hosted=''
    if [ $# -gt 0 ]; then
        [ "$1" = --hosts ] && [ $# = 2 ] || die "start: expected --hosts N, got '$*'"
        NODES=$2 hosted=1
    fi
    [[ $NODES =~ ^[1-9][0-9]*$ ]] || die "start: expected a positive number of nodes, got '$NODES'"
    umask 022
    mkdir -p "$DIR"
    [ -O "$DIR" ] && [ ! -L "$DIR" ] || die "$DIR belongs to somebody else"
    chmod 755 "$DIR"
    mkdir -p "$DIR"/{log,run/own,state,spool,munge}
    chmod 700 "$DIR/munge" "$DIR/state"
    exec 9>"$DIR/run/lock"
    flock -w 120 9 || die "another slurm/local.sh is at work in $DIR"
    install_packages

    if alive slurmctld >/dev/null; then
        n=$(node_names | grep -c '^host' || true)
        [ -z "$hosted" ] || [ "$n" = "$NODES" ] || die "start --hosts $NODES: a cluster of \
$(node_names | xargs) runs; stop it first"
    else
        [ ! -d "$VIGPIPE_HOSTS_DIR" ] || "$HOSTS" stop
        if [ -n "$hosted" ]; then
            "$HOSTS" start $((NODES + 1)) 9>&-
            host=host$((NODES + 1)) addr=10.213.0.$((NODES + 1))
        else
            host=$(uname -n); host=${host%%.*}
            addr=$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }') || true
            [[ $addr == 127.* ]] || die "the host name '$host' means '${addr:-nothing}', not a loopback \
address, so the daemons would be open to the network; put '127.0.0.1 $host' first in /etc/hosts"
        fi
        write_config "$host" "$addr"
    fi
    if [ "${SLURM_LOCAL_HOSTS:-0}" = 1 ]; then
        addr=$(sed -n 's/^SlurmctldHost=.*(\(.*\))/\1/p' "$CONF")
        n=$(hosts_without_us; echo "$addr $(node_names | xargs) $MARK")
        printf '%s\n' "$n" >/etc/hosts || die "SLURM_LOCAL_HOSTS=1 must be able to write /etc/hosts"
    fi
    if ! alive munged >/dev/null; then
        if [ ! -s "$DIR/munge/key" ]; then
            (umask 077; head -c 128 /dev/urandom >"$DIR/munge/key")
        fi
        rm -f "$DIR/run/munged.started"
        munged --key-file="$DIR/munge/key" --seed-file="$DIR/munge/seed" \
            --socket="$DIR/run/munge.socket" --pid-file="$DIR/run/munged.pid" \
            --log-file="$DIR/log/munged.log" 9>&- || not_started munged
        remember munged
    fi
    alive slurmctld >/dev/null || daemon slurmctld "$(controller)" slurmctld -f "$CONF"
    for n in $(node_names); do
        alive "slurmd-$n" >/dev/null && continue
        mkdir -p "$DIR/spool/$n"
        daemon "slurmd-$n" "$n" slurmd -f "$CONF" -N "$n"
    done
    wait_ready
    say "ready after $((SECONDS - began)) s: $(srun --version), $(node_names | wc -l) nodes in $DIR"
    if [ -d "$VIGPIPE_HOSTS_DIR" ]; then
        cat <<END
Use it from the host of slurmctld:
    eval "\$($0 env)"
    $HOSTS run $(controller) srun -N2 -n4 --ntasks-per-node=2 python -m vigpipe.train --stages 2 --dp 2
END
        return
    fi
    cat <<END
Use it:
    export SLURM_CONF=$CONF
    srun -N2 -n4 --ntasks-per-node=2 bash -c 'echo \$SLURM_PROCID on \$SLURMD_NODENAME'
    sbatch -N2 --ntasks-per-node=2 -t 10 --requeue --open-mode=append --signal=B:USR1@60 job.sh
    scontrol requeue JOB; scancel JOB; scancel --signal=KILL JOB.0
    sbatch -p urgent ...             preempts (requeues) jobs in the partition main
    $0 fail node2; $0 start          lose a node, get it back
All nodes are this machine at $(sed -n 's/^SlurmctldHost=.*(\(.*\))/\1/p' "$CONF"); unless started with SLURM_LOCAL_HOSTS=1
their names do not resolve: export MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo for torch.
Every job's end is in $DIR/log/jobs.txt, and the daemons' logs beside it.
END
}

# Pids of one node's step daemons (they write to its log) and of its tasks (they
# have its name in their environment).
node_processes() {
    local f pid
    { grep -lx slurmstepd /proc/[0-9]*/comm || true; } 2>/dev/null | while read -r f; do
        pid=${f#/proc/}; pid=${pid%/comm}
        if readlink "/proc/$pid"/fd/* 2>/dev/null | grep -qxF "$DIR/log/slurmd-$1.log"; then echo "$pid"; fi
    done
    { grep -lzxF "SLURMD_NODENAME=$1" /proc/[0-9]*/environ || true; } 2>/dev/null | while read -r f; do
        pid=${f#/proc/}; pid=${pid%/environ}
        if [ "$pid" != $$ ] && grep -qzxF "SLURM_CONF=$CONF" "$f" 2>/dev/null; then echo "$pid"; fi
    done
}
signal_node() {  # signal_node NAME SIGNAL: slurmd, then step daemons, then tasks
    local pid steps=() tasks=()
    known_node "$1"
    for pid in $(node_processes "$1"); do
        if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = slurmstepd ]; then steps+=("$pid"); else tasks+=("$pid"); fi
    done
    if pid=$(alive "slurmd-$1"); then kill "-$2" "$pid"; fi
    for pid in ${steps[@]+"${steps[@]}"} ${tasks[@]+"${tasks[@]}"}; do
        kill "-$2" "$pid" 2>/dev/null || true
    done
    if [ "$2" = CONT ] && pid=$(alive "slurmd-$1"); then  # nsenter has stopped with it
        pid=$(awk '/^PPid:/ { print $2 }' "/proc/$pid/status")
        [ "$(cat "/proc/$pid/comm" 2>/dev/null)" != nsenter ] || kill -CONT "$pid"
    fi
    say "SIG$2 to $1: slurmd, ${#steps[@]} step daemons, ${#tasks[@]} task processes"
}

end() {  # end NAME: TERM, then KILL after 10 s, only while the pid is still ours
    local pid was sig
    if pid=$(alive "$1"); then
        was=$(started "$pid")
        for sig in TERM KILL; do
            kill -CONT "$pid" 2>/dev/null || true
            kill "-$sig" "$pid" 2>/dev/null || true
            for _ in $(seq 100); do  # the daemon removes its pid file before it is gone
                [ "$(started "$pid")" = "$was" ] || break 2
                sleep 0.1
            done
        done
    fi
    rm -f "$DIR/run/$1.pid" "$DIR/run/$1.started"
}

stop() {
    local n pid left
    [ -d "$DIR/run" ] || { say "nothing to stop in $DIR"; return; }
    [ -O "$DIR" ] || die "$DIR belongs to somebody else"
    exec 9>"$DIR/run/lock"
    flock -w 120 9 || die "another slurm/local.sh is at work in $DIR"
    if alive slurmctld >/dev/null && alive munged >/dev/null; then
        for n in $(node_names); do
            for pid in $(node_processes "$n"); do kill -CONT "$pid" 2>/dev/null || true; done
            if pid=$(alive "slurmd-$n"); then kill -CONT "$pid"; fi
        done
        n=$(at_head timeout 10 squeue -h -o %A 2>/dev/null | sort -u | xargs) || n=''
        # shellcheck disable=SC2086
        [ -z "$n" ] || at_head timeout 10 scancel $n 2>/dev/null || true
        for _ in $(seq $(((KILLWAIT + 5) * 5))); do
            left=$(for n in $(node_names); do node_processes "$n"; done)
            [ -n "$left" ] || break
            sleep 0.2
        done
    fi
    for n in $(node_names); do
        for pid in $(node_processes "$n"); do kill -KILL "$pid" 2>/dev/null || true; done
        end "slurmd-$n"
    done
    end slurmctld
    end munged
    [ ! -d "$VIGPIPE_HOSTS_DIR" ] || "$HOSTS" stop
    rm -f "$DIR/run/munge.socket" "$DIR/run/munge.socket.lock"
    if grep -q "$MARK\$" /etc/hosts && [ -w /etc/hosts ]; then
        n=$(hosts_without_us); printf '%s\n' "$n" >/etc/hosts
    fi
    say "stopped; $DIR keeps the logs and the state"
}

status() {
    local n pid rc=0
    [ -e "$CONF" ] || { say "never started in $DIR"; return 3; }
    for n in munged slurmctld $(node_names | sed 's/^/slurmd-/'); do
        if pid=$(alive "$n"); then say "$n runs, pid $pid"; else say "$n is down"; rc=3; fi
    done
    if alive slurmctld >/dev/null && alive munged >/dev/null; then
        at_head timeout 10 sinfo -N -l
        at_head timeout 10 squeue
    fi
    return $rc
}

# Only what is ours says which processes, hosts and settings there are.
[ ! -e "$DIR" ] || { [ -O "$DIR" ] && [ ! -L "$DIR" ]; } || die "$DIR belongs to somebody else"
case ${1:-help} in
    start) shift; start "$@" ;;
    --hosts) start "$@" ;;
    stop) stop ;;
    status) status ;;
    env)
        printf 'export SLURM_CONF=%q\n' "$CONF"
        [ ! -d "$VIGPIPE_HOSTS_DIR" ] || printf 'export VIGPIPE_HOSTS_DIR=%q\n' "$VIGPIPE_HOSTS_DIR"
        ;;
    fail) signal_node "${2:-}" KILL; rm -f "$DIR/run/slurmd-$2.pid" "$DIR/run/slurmd-$2.started" ;;
    freeze) signal_node "${2:-}" STOP ;;
    thaw) signal_node "${2:-}" CONT ;;
    wipe) stop; exec 9>&-; rm -rf -- "$DIR"/{log,run,state,spool,munge} "$CONF"; rmdir -- "$DIR" 2>/dev/null || true ;;
    *) sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "$0" ;;
esac
