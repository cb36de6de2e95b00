#!/usr/bin/env bash
# slurm/hosts.sh - several hosts on one Linux machine, each with an address and a name of its own.
#
# For trying vigpipe over a network without a cluster, and for tests/slurm/test_hosts.py. A host is
# a process with namespaces of its own (network, name, mounts, process ids); its only interfaces are
# lo and eth0, and as on every Debian its own name means 127.0.1.1 on itself. Files are shared.
#
#   slurm/hosts.sh start N        host1 ... hostN, 10.213.0.1 ... 10.213.0.N
#   slurm/hosts.sh run HOST CMD   run a command on a host, in the current folder, and return its code
#   slurm/hosts.sh stop           end the hosts, and all that runs on them
#
# It needs root and Debian's iproute2 and util-linux. Nothing of this machine's own network changes.
#
# Settings (environment):
#   VIGPIPE_HOSTS_DIR   where the hosts' process ids are; only root can write there   [/run/vigpipe-hosts]
set -euo pipefail

DIR=${VIGPIPE_HOSTS_DIR:-/run/vigpipe-hosts}
NET=10.213.0
PATH=$PATH:/usr/sbin:/sbin

die() { printf 'slurm/hosts.sh: %s\n' "$*" >&2; exit 2; }

# started PID: when a process began, by which a recycled id is told apart.
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'; }
# pid_of NAME: the process id of a host, or of the switch between them, if it runs.
pid_of() {
    local pid when
    { read -r pid when <"$DIR/$1"; } 2>/dev/null || return 1
    [[ $pid =~ ^[0-9]+$ && $when && $(started "$pid") = "$when" ]] || return 1
    echo "$pid"
}

# spawn NAME OPTIONS: start a process that holds namespaces, and note it.
spawn() {
    local name=$1 pid child='' i
    shift
    unshare --net --fork --kill-child "$@" sleep infinity </dev/null >/dev/null 2>&1 &
    pid=$!
    disown
    for ((i = 0; i < 100; i++)); do
        child=$(cat "/proc/$pid/task/$pid/children" 2>/dev/null | tr -d ' ') || true
        [ -z "$child" ] || [ "$(cat "/proc/$child/comm" 2>/dev/null)" != sleep ] || break
        kill -0 "$pid" 2>/dev/null || die "this machine allows no namespaces: unshare $* has failed"
        sleep 0.05
    done
    [ -n "$child" ] || die "$name did not start"
    echo "$child $(started "$child")" >"$DIR/$name"
}

start() {
    local count=$1 i j pid switch
    [[ $count =~ ^[1-9][0-9]?$ ]] || die "start $count: expected a number of hosts from 1 to 99"
    [ "$(id -u)" = 0 ] || die "start: needs root, for namespaces of networks"
    command -v ip >/dev/null || die "ip is missing: install Debian's iproute2"
    mkdir -m 700 "$DIR" 2>/dev/null || [ -O "$DIR" ] || die "$DIR: belongs to somebody else"
    ! pid_of switch >/dev/null || die "hosts run already: slurm/hosts.sh stop"
    trap 'code=$?; [ $code = 0 ] || stop; exit $code' EXIT
    spawn switch
    switch=$(pid_of switch)
    in_switch=(nsenter -t "$switch" --net)
    "${in_switch[@]}" ip link add br0 type bridge
    "${in_switch[@]}" ip link set br0 up
    for ((i = 1; i <= count; i++)); do
        spawn "host$i" --uts --mount --pid --mount-proc
        pid=$(pid_of "host$i")
        ip link add eth0 netns "$pid" type veth peer name "port$i" netns "$switch"
        "${in_switch[@]}" ip link set "port$i" master br0 up
        {
            printf '127.0.0.1 localhost\n127.0.1.1 host%d\n' "$i"
            for ((j = 1; j <= count; j++)); do [ "$j" = "$i" ] || echo "$NET.$j host$j"; done
        } >"$DIR/names$i"
        nsenter -t "$pid" --net --uts --mount sh -ec "
            hostname host$i
            mount --bind '$DIR/names$i' /etc/hosts
            ip link set lo up
            ip addr add $NET.$i/24 dev eth0
            ip link set eth0 up"
    done
}

run() {
    local pid
    pid=$(pid_of "$1") || die "no such host: '$1' (have: $(cd "$DIR" 2>/dev/null && ls -d host* 2>/dev/null | xargs))"
    shift
    [ $# -gt 0 ] || die "run: no command was given"
    exec nsenter -t "$pid" --net --uts --mount --pid --wd="$PWD" "$@"
}

stop() {
    local file pid
    for file in "$DIR"/host* "$DIR"/switch; do
        ! pid=$(pid_of "${file##*/}") || kill -KILL "$pid"
    done
    rm -f "$DIR"/host* "$DIR"/names* "$DIR"/switch
    rmdir "$DIR" 2>/dev/null || true
}

case ${1:-} in
    start) [ $# = 2 ] || die "start: expected the number of hosts"; start "$2" ;;
    run) [ $# -ge 2 ] || die "run: expected a host and a command"; shift; run "$@" ;;
    stop) stop ;;
    *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; [ $# = 0 ] || exit 2 ;;
esac
