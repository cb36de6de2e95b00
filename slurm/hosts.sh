#!/usr/bin/env bash
# slurm/hosts.sh - several hosts on one Linux machine, each with an address and a name of its own.
#
# For trying vigpipe over a network without a cluster, and for tests/slurm. A host is a process with
# namespaces of its own (network, name, mounts, process ids); its only interfaces are lo and eth0,
# which leads to a switch between the hosts, and as on every Debian its own name means 127.0.1.1 on
# itself. Files are shared.
#
#   slurm/hosts.sh start N        host1 ... hostN, 10.213.0.1 ... and fd00:213::1 ...
#       --rate 100mbit            what a host can send
#       --delay 10ms              how much later what a host sends arrives
#       --ipv6                    addresses and names of IPv6 alone
#       --no-names                no host's name has an address, not even its own
#       --until PID               stop when that process ends
#   slurm/hosts.sh run HOST CMD   run a command on a host, in the current folder, and return its code
#   slurm/hosts.sh down|up HOST   take its interface down; up again
#   slurm/hosts.sh cut A B        drop what A sends to B; for both directions, cut B A as well
#   slurm/hosts.sh half-open A B  answer what A sends to B with a reset, of which B knows nothing
#   slurm/hosts.sh mend A B       let all through again
#   slurm/hosts.sh allow HOST PORTS   drop what others send to other TCP ports (22,29500-29510 or all)
#   slurm/hosts.sh freeze HOST    stop all its processes and what it sends and gets; thaw HOST
#   slurm/hosts.sh stop           end the hosts, and all that runs on them
#
# It needs root and Debian's iproute2 and util-linux, and for cut, half-open, allow and freeze
# nftables. Where the kernel has no netem, packets are delayed by slurm/relay.py. Nothing of this
# machine's own network changes, and if the first of its processes is killed, all others end.
#
# Settings (environment):
#   VIGPIPE_HOSTS_DIR   where the hosts' process ids are; only root can write there   [/run/vigpipe-hosts]
set -euo pipefail

DIR=${VIGPIPE_HOSTS_DIR:-/run/vigpipe-hosts}
HERE=$(cd "$(dirname "$0")" && pwd)
V4=10.213.0. V6=fd00:213::
PATH=$PATH:/usr/sbin:/sbin

die() { printf 'slurm/hosts.sh: %s\n' "$*" >&2; exit 2; }

# started PID: when a process began, by which a recycled id is told apart.
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'; }
# pid_of NAME: the process id of a host, of the switch between them, or of their keeper, if it runs.
pid_of() {
    local pid when
    { read -r pid when <"$DIR/$1"; } 2>/dev/null || return 1
    [[ $pid =~ ^[0-9]+$ && $when && $(started "$pid") = "$when" ]] || return 1
    echo "$pid"
}
hosts() { (cd "$DIR" 2>/dev/null && ls -d host* 2>/dev/null) || true; }  # their names
host() {  # host NAME: its process id
    local names
    names=$(hosts | xargs)
    [[ " $names " = *" $1 "* && $1 = host* ]] || die "no such host: '$1' (have: $names)"
    pid_of "$1" || die "$1 has ended: slurm/hosts.sh stop, and start again"
}
on() {  # on HOST CMD: in its network
    local pid
    pid=$(host "$1")
    shift
    nsenter -t "$pid" --net "$@"
}

# spawn NAME OPTIONS: start a process that holds namespaces, and note it; it ends with this one.
spawn() {
    local name=$1 pid child='' i
    shift
    setpriv --pdeathsig KILL unshare --net --fork --kill-child "$@" sleep infinity </dev/null >/dev/null 2>&1 &
    pid=$!
    for ((i = 0; i < 200; i++)); do
        child=$(cat "/proc/$pid/task/$pid/children" 2>/dev/null | tr -d ' ') || true
        [ -z "$child" ] || [ "$(cat "/proc/$child/comm" 2>/dev/null)" != sleep ] || break
        kill -0 "$pid" 2>/dev/null || die "this machine allows no namespaces: unshare $* has failed"
        sleep 0.05
    done
    [ -n "$child" ] || die "$name did not start"
    echo "$child $(started "$child")" >"$DIR/$name"
}

names() {  # names I: what is in /etc/hosts of a host
    local net=$V4 j
    echo '127.0.0.1 localhost'
    [ -z "$ipv6" ] || { net=$V6; echo '::1 localhost'; }
    [ -z "$no_names" ] || return 0
    [ -n "$ipv6" ] || echo "127.0.1.1 host$1"
    for ((j = 1; j <= count; j++)); do
        [ "$j" = "$1" ] && [ -z "$ipv6" ] || echo "$net$j host$j"
    done
}

# forget: remove what is noted of hosts that have ended, or are about to.
forget() { rm -f "$DIR"/{host,names}* "$DIR"/{keeper,switch,taps,ready}; }

# keep ...: be the process that has the hosts, until it is asked to end.
keep() {
    count=$1 rate=$2 delay=$3 ipv6=$4 no_names=$5 until=$6
    local i pid pids=() rest switch netem= relayed= parent=root
    trap 'kill -KILL $(jobs -p) 2>/dev/null || true
        forget
        [ -s "$DIR/log" ] || rm -f "$DIR/log"
        rmdir "$DIR" 2>/dev/null || true' EXIT
    trap exit TERM
    echo "$$ $(started $$)" >"$DIR/keeper"
    spawn switch
    switch=$(pid_of switch)
    if [ -n "$delay" ]; then
        relayed=1
        if nsenter -t "$switch" --net tc qdisc add dev lo root netem delay 1ms 2>/dev/null; then
            netem=1 relayed='' parent='parent 1:1'
        fi
    fi
    nsenter -t "$switch" --net ip link add br0 type bridge
    nsenter -t "$switch" --net ip link set br0 up
    for ((i = 1; i <= count; i++)); do
        spawn "host$i" --uts --mount --pid --mount-proc
        pid=$(pid_of "host$i")
        pids+=("$pid")
        names "$i" >"$DIR/names$i"
        [ -z "$relayed" ] || continue
        ip link add eth0 netns "$pid" type veth peer name "port$i" netns "$switch"
        nsenter -t "$switch" --net ip link set "port$i" master br0 up
    done
    if [ -n "$relayed" ]; then
        setpriv --pdeathsig KILL python3 "$HERE/relay.py" "${delay%ms}" "${pids[@]}" >"$DIR/taps" &
        until [ -s "$DIR/taps" ]; do
            kill -0 $! 2>/dev/null || die "the relay between the hosts did not start"
            sleep 0.05
        done
    fi
    for ((i = 1; i <= count; i++)); do
        nsenter -t "${pids[i - 1]}" --net --uts --mount sh -ec "
            hostname host$i
            mount --bind '$DIR/names$i' /etc/hosts
            ip link set lo up
            echo 1 >/proc/sys/net/ipv6/conf/eth0/keep_addr_on_down
            ${ipv6:+:} ip addr add $V4$i/24 dev eth0
            ip addr add $V6$i/64 dev eth0 nodad
            ${netem:+tc qdisc add dev eth0 root handle 1: netem delay $delay limit 100000}
            ${rate:+tc qdisc add dev eth0 $parent tbf rate $rate burst 128kb latency 400ms}
            ip link set eth0 up"
    done
    echo ready >"$DIR/ready"
    if [ -n "$until" ]; then rest=(tail --pid="$until" -f /dev/null); else rest=(sleep infinity); fi
    setpriv --pdeathsig KILL "${rest[@]}" &
    wait $!
}

start() {
    local count=${1:-} rate='' delay='' ipv6='' no_names='' until=''
    [[ $count =~ ^[1-9][0-9]?$ ]] || die "start: expected a number of hosts from 1 to 99, got '$count'"
    shift
    while [ $# -gt 0 ]; do
        if [[ "$1 ${2:-}" =~ ^--rate\ [1-9][0-9]*[kmg]bit$ ]]; then rate=$2; shift
        elif [[ "$1 ${2:-}" =~ ^--delay\ [1-9][0-9]*ms$ ]]; then delay=$2; shift
        elif [[ "$1 ${2:-}" =~ ^--until\ [1-9][0-9]*$ ]]; then until=$2; shift
        elif [ "$1" = --ipv6 ]; then ipv6=1
        elif [ "$1" = --no-names ]; then no_names=1
        else die "start: expected --rate such as 100mbit, --delay such as 10ms, --ipv6, --no-names or --until PID, got '$*'"
        fi
        shift
    done
    [ "$(id -u)" = 0 ] || die "start: needs root, for namespaces of networks"
    command -v ip >/dev/null || die "ip is missing: install Debian's iproute2"
    [[ $DIR =~ ^/[A-Za-z0-9/._-]+$ ]] || die "$DIR: expected an absolute folder of letters, digits and . _ -"
    [ -z "$until" ] || kill -0 "$until" 2>/dev/null || die "start --until $until: there is no such process"
    mkdir -p -m 700 "$DIR" || die "$DIR: cannot be made"
    chmod 700 "$DIR"
    exec 9>"$DIR/lock"
    flock -n 9 || die "another start is under way"
    ! pid_of keeper >/dev/null || die "hosts run already: slurm/hosts.sh stop"
    forget  # what a keeper that was killed has left
    setsid bash "$0" keep "$count" "$rate" "$delay" "$ipv6" "$no_names" "$until" </dev/null >"$DIR/log" 2>&1 9>&- &
    disown
    until [ -e "$DIR/ready" ]; do
        kill -0 $! 2>/dev/null || { cat "$DIR/log" >&2 || true; stop; exit 2; }
        sleep 0.05
    done
}

run() {
    local pid
    pid=$(host "$1")
    shift
    # The folder is entered there: nsenter's own --wd would lead past what is mounted on the host.
    exec nsenter -t "$pid" --net --uts --mount --pid sh -c 'cd -- "$0" && exec "$@"' "$PWD" "$@"
}

number() { host "$1" >/dev/null; echo "${1#host}"; }

# drop HOST TABLE RULES: let a host have a table of rules of nftables, in place of one of this name.
drop() {
    command -v nft >/dev/null || die "nft is missing: install Debian's nftables"
    on "$1" nft -f - <<END
table inet $2
delete table inet $2
table inet $2 {
$3
}
END
}
accept() {
    host "$1" >/dev/null
    on "$1" nft delete table inet "$2" 2>/dev/null || true
}

cut() {  # cut A B, or with a third word what is done to what A sends to B instead
    local i
    i=$(number "$1")
    drop "$2" "cut_$1" "chain in {
        type filter hook input priority 0
        ip saddr $V4$i ${3:-drop}
        ip6 saddr $V6$i ${3:-drop}
    }"
}

allow() {
    [[ $2 = all || $2 =~ ^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$ ]] || die "allow: expected ports such as 22,29500-29510, or all, got '$2'"
    if [ "$2" = all ]; then accept "$1" allow; return; fi
    drop "$1" allow "chain in {
        type filter hook input priority 0
        iifname lo accept
        tcp flags & (syn | ack) == syn tcp dport != { $2 } drop
    }" 2>/dev/null || die "allow: expected ports from 1 to 65535, got '$2'"
}

# processes HOST: its processes, but for the one that has its namespaces.
processes() {
    local first space pid
    first=$(host "$1")
    space=$(readlink "/proc/$first/ns/pid")
    for pid in /proc/[0-9]*; do
        pid=${pid#/proc/}
        [ "$pid" = "$first" ] || [ "$(readlink "/proc/$pid/ns/pid" 2>/dev/null)" != "$space" ] || echo "$pid"
    done
}

freeze() {
    drop "$1" freeze "chain in {
        type filter hook input priority 0; policy drop
    }
    chain out {
        type filter hook output priority 0; policy drop
    }"
    kill -STOP $(processes "$1") 2>/dev/null || true
}

# waiters HOST: what waits, outside, for its processes: nsenter stops itself when one is stopped.
waiters() {
    local pid parent
    for pid in $(processes "$1"); do
        parent=$(awk '/^PPid:/ { print $2 }' "/proc/$pid/status" 2>/dev/null) || continue
        [ "$(cat "/proc/$parent/comm" 2>/dev/null)" != nsenter ] || echo "$parent"
    done
}

thaw() {
    accept "$1" freeze
    kill -CONT $(processes "$1") $(waiters "$1") 2>/dev/null || true
}

stop() {
    local name pid when i waiting=()
    for name in $(hosts); do
        ! pid_of "$name" >/dev/null || waiting+=($(waiters "$name"))
    done
    for name in keeper switch $(hosts); do
        pid=$(pid_of "$name") || continue
        when=$(started "$pid") || true
        if [ "$name" = keeper ]; then kill "$pid" || true; else kill -KILL "$pid" || true; fi
        kill -CONT ${waiting[@]+"${waiting[@]}"} 2>/dev/null || true
        for ((i = 0; i < 200; i++)); do
            [ "$(started "$pid")" = "$when" ] || break
            sleep 0.05
        done
    done
    forget
    rm -f "$DIR"/{log,lock}
    rmdir "$DIR" 2>/dev/null || true
}

# What only root may write is followed, and nothing that somebody else has put there.
[ ! -e "$DIR" ] || { [ -O "$DIR" ] && [ ! -L "$DIR" ]; } || die "$DIR: belongs to somebody else"
expect() { [ "$1" = "$2" ] || die "$3"; }  # expect NUMBER FOUND WHAT
case ${1:-} in
    start) shift; start "$@" ;;
    run) [ $# -ge 3 ] || die "run: expected a host and a command"; shift; run "$@" ;;
    down | up) expect 2 $# "$1: expected a host"; on "$2" ip link set eth0 "$1" ;;
    cut) expect 3 $# "cut: expected two hosts"; cut "$2" "$3" ;;
    half-open) expect 3 $# "half-open: expected two hosts"; cut "$2" "$3" "tcp flags & rst == 0 reject with tcp reset" ;;
    mend) expect 3 $# "mend: expected two hosts"; number "$2" >/dev/null; accept "$3" "cut_$2" ;;
    allow) expect 3 $# "allow: expected a host and ports"; allow "$2" "$3" ;;
    freeze | thaw) expect 2 $# "$1: expected a host"; "$1" "$2" ;;
    keep) shift; keep "$@" ;;
    stop) stop ;;
    *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; [[ $# = 0 || $1 = -h || $1 = --help ]] || exit 2 ;;
esac
