"""Every way of being started, read from its environment variables; the ranks meet."""

import os
import socket
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.world import run_ranks
from vigpipe.errors import InputError
from vigpipe.parallel import launch
from vigpipe.parallel.launch import Launch, expand_nodes, expand_tasks, from_environment

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run7",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "29500",
}
# Rank 3 of `srun -N2 -n4`, which placed 3 + 1.
SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
ONE_NODE = {
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "gpu07",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
}


# ---- who am I


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, Launch(3, 4, 1, 2, "torchrun", "env://", "run7.0")),
        (
            {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"},
            Launch(3, 4, 1, 2, "torchrun", "env://", "run7.2"),
        ),
        (
            {**TORCHRUN, launch.FOLDER_VARIABLE: "/tmp/vigpipe-x"},
            Launch(3, 4, 1, 2, "local", "file:///tmp/vigpipe-x/ranks", "vigpipe-x"),
        ),
        (SRUN, Launch(3, 4, 0, 1, "srun", "tcp://node1:21215", "slurm-12.3.0")),
        (
            {**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"},
            Launch(2, 4, 2, 3, "srun", "tcp://node1:21215", "slurm-12.3.0"),
        ),
        (
            {**SRUN, **ONE_NODE},
            Launch(3, 4, 3, 4, "srun", "tcp://127.0.0.1:21215", "slurm-12.3.0"),
        ),
        (
            {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5", "SLURM_RESTART_COUNT": "1"},
            Launch(3, 4, 0, 1, "srun", "tcp://10.0.0.1:5", "slurm-12.3.1"),
        ),
        # torchrun inside an srun step
        ({**SRUN, **TORCHRUN}, Launch(3, 4, 1, 2, "torchrun", "env://", "run7.0")),
    ],
)
def test_ranks_of_every_launcher(env, expected):
    assert from_environment(env) == expected


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "left over in a shell"},
        # plain python in a batch script of four tasks
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_alone(env):
    me = from_environment(env)
    assert (me.rank, me.world_size, me.launcher, me.init_method) == (0, 1, "alone", None)
    assert me.is_local


def test_is_local_only_if_all_ranks_are_on_this_host():
    assert from_environment({**SRUN, **ONE_NODE}).is_local
    assert not from_environment(SRUN).is_local


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (TORCHRUN, {"RANK": "4"}, "RANK=4: expected a whole number from 0 to 3"),
        (TORCHRUN, {"RANK": "-1"}, "RANK=-1: expected"),
        (TORCHRUN, {"RANK": "one"}, "RANK=one: expected"),
        (TORCHRUN, {"RANK": "٣"}, "RANK=٣: expected"),
        (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected a whole number of at least 1"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5: expected"),
        (TORCHRUN, {"LOCAL_RANK": "2"}, "LOCAL_RANK=2: expected a whole number from 0 to 1"),
        (TORCHRUN, {"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        (TORCHRUN, {"MASTER_PORT": None}, "MASTER_PORT is not set"),
        (SRUN, {"SLURM_STEP_NUM_TASKS": "4.0"}, r"SLURM_STEP_NUM_TASKS=4\.0: expected"),
        (SRUN, {"SLURM_PROCID": None}, "SLURM_PROCID is not set"),
        (SRUN, {"SLURM_PROCID": "9"}, "SLURM_PROCID=9: expected a whole number from 0 to 3"),
        (SRUN, {"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1: expected"),
        (SRUN, {"SLURM_NODEID": "2"}, "SLURM_NODEID=2: expected"),
        (SRUN, {"SLURM_PROCID": "0"}, "SLURM_NODEID=1: expected rank 0 .* set MASTER_ADDR"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "5"}, "5 tasks in"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "4"}, "expected 2 nodes .* got 1 nodes"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_STEP_TASKS_PER_NODE=2\(x: expected"),
        (SRUN, {"SLURM_STEP_NODELIST": "node[1-"}, r"SLURM_STEP_NODELIST=node\[1-: expected"),
        (SRUN, {"MASTER_PORT": "65536"}, "MASTER_PORT=65536: expected"),
        (SRUN, {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
    ],
)
def test_errors_name_the_variable(base, change, message):
    env = {name: text for name, text in {**base, **change}.items() if text is not None}
    with pytest.raises(InputError, match=message) as caught:
        from_environment(env)
    assert "\n" not in str(caught.value)


# ---- Slurm's lists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        (
            "node[1-3,07-09],gpu1",
            ["node1", "node2", "node3", "node07", "node08", "node09", "gpu1"],
        ),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("rack[1-2]n[5,7]", ["rack1n5", "rack1n7", "rack2n5", "rack2n7"]),
        ("a.example,b.example", ["a.example", "b.example"]),
    ],
)
def test_expand_nodes(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a,", "a[", "a[]", "a]", "a[1-]", "a[3-1]", "a[x]", "a b", "a[1-[2]]"]
)
def test_expand_nodes_refuses(text):
    with pytest.raises(InputError, match="SLURM_STEP_NODELIST"):
        expand_nodes(text)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True),
            st.lists(
                st.tuples(st.integers(0, 300), st.integers(0, 20), st.integers(1, 4)), max_size=3
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_expand_nodes_undoes_slurms_abbreviation(groups):
    items, names = [], []
    for prefix, ranges in groups:
        brackets = []
        for first, more, width in ranges:
            low = f"{first:0{width}d}"
            brackets.append(f"{low}-{first + more:0{width}d}" if more else low)
            names += [f"{prefix}{first + i:0{len(low)}d}" for i in range(more + 1)]
        names += [] if ranges else [prefix]
        items.append(prefix + (f"[{','.join(brackets)}]" if brackets else ""))
    assert expand_nodes(",".join(items)) == names


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20)), min_size=1, max_size=5))
def test_expand_tasks_undoes_slurms_abbreviation(runs):
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in runs)
    assert expand_tasks(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]


@given(st.integers(0, 2**31), st.integers(0, 1000))
def test_the_store_port_is_below_the_ephemeral_range(job, step):
    env = {**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
    _, _, port = (from_environment(env).init_method or "").rpartition(":")
    assert 1024 < int(port) < 32768


# ---- threads


def test_threads_per_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    srun = from_environment(SRUN)
    two = replace(srun, local_world_size=2)
    cpus = {"SLURM_CPUS_PER_TASK": "5"}
    assert launch.threads_per_rank(3, 2, {"OMP_NUM_THREADS": "7"}) == 3
    assert launch.threads_per_rank(None, 2, {"OMP_NUM_THREADS": "7,2"}) == 7
    assert launch.threads_per_rank(None, two, {**cpus, "OMP_NUM_THREADS": "7"}) == 7
    assert launch.threads_per_rank(None, two, cpus) == 5
    assert launch.threads_per_rank(None, 2, cpus) == 4  # ranks of our own in a batch script
    assert launch.threads_per_rank(None, two, {}) == 4
    assert launch.threads_per_rank(None, 3, {}) == 2
    assert launch.threads_per_rank(None, 16, {"OMP_NUM_THREADS": ""}) == 1


@pytest.mark.parametrize(
    ("requested", "env", "message"),
    [
        (0, {}, "expected at least 1, got 0"),
        (None, {"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS=many: expected"),
        (None, {"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS=0: expected"),
    ],
)
def test_threads_per_rank_refuses(requested, env, message):
    with pytest.raises(InputError, match=message):
        launch.threads_per_rank(requested, 1, env)


# ---- meeting


def test_a_node_name_that_does_not_resolve_asks_for_master_addr():
    env = {**SRUN, "SLURM_STEP_NODELIST": "no-such-node.invalid,other"}
    with pytest.raises(InputError, match=r"'no-such-node.invalid'.* set MASTER_ADDR"):
        launch.init_process_group(from_environment(env), "gloo", 5)


def test_a_taken_port_asks_for_master_port(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {**SRUN, **ONE_NODE, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        env["MASTER_PORT"] = str(taken.getsockname()[1])
        with pytest.raises(InputError, match=f"port {env['MASTER_PORT']} .* set MASTER_PORT"):
            launch.init_process_group(from_environment(env), "gloo", 5)


def test_an_unknown_interface_is_an_input_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(InputError, match="GLOO_SOCKET_IFNAME=eth77: no interface 'eth77'"):
        launch.init_process_group(from_environment({}), "gloo", 5)


def test_a_host_name_that_means_loopback_asks_for_an_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    env = {**SRUN, "MASTER_ADDR": "192.0.2.1"}  # an address of nobody
    with pytest.raises(InputError, match=r"means 127.0.1.1 .* set GLOO_SOCKET_IFNAME"):
        launch.init_process_group(from_environment(env), "gloo", 5)


def meet_as_srun(rank: int, world_size: int, port: int, job: int) -> tuple[int, list[str]]:
    """Leave the test's world, meet again as ranks of srun on one node; list open sockets."""
    dist.destroy_process_group()
    env = {**SRUN, **ONE_NODE, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    env |= {"SLURM_STEP_NUM_TASKS": str(world_size), "SLURM_JOB_ID": str(job)}
    env |= {"SLURM_STEP_TASKS_PER_NODE": str(world_size), "MASTER_PORT": str(port)}
    launch.init_process_group(from_environment(env), "gloo", 20)
    ranks: list[int] = [0] * world_size
    dist.all_gather_object(ranks, rank)
    return sum(ranks), listening_addresses()


def listening_addresses() -> list[str]:
    """Addresses (in /proc's hexadecimal) on which this process listens."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    mine = {os.readlink(link) for link in links if os.path.islink(link)}
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in lines.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                    found.append(fields[1].split(":")[0])
    return found


@pytest.mark.multiprocess
def test_a_one_node_step_listens_on_loopback_only():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for total, addresses in run_ranks(meet_as_srun, 2, port, 12):
        assert total == 1
        assert set(addresses) == {"0100007F"}  # 127.0.0.1


def alone(rank: int, world_size: int) -> float:
    import torch

    dist.destroy_process_group()
    launch.init_process_group(from_environment({}), "gloo", 5)
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


@pytest.mark.multiprocess
def test_one_rank_alone_has_a_process_group_too():
    assert run_ranks(alone, 1) == [1.0]


def test_a_token_keeps_ranks_of_another_start_apart_and_is_not_shown():
    env = {**SRUN, "VIGPIPE_TOKEN": "secret of this start"}
    job = from_environment(env).job
    assert job.startswith(f"{from_environment(SRUN).job}.")
    assert "secret" not in job
    assert job == from_environment(env).job
    assert job != from_environment({**env, "VIGPIPE_TOKEN": "of another"}).job


def meet(rank, world_size, folder, jobs):
    """Join a store that all ranks share, as a rank of one of the jobs."""
    store = dist.FileStore(str(folder / "shared"))  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(timedelta(seconds=2))
    me = Launch(rank, world_size, rank, world_size, "srun", "tcp://127.0.0.1:1", jobs[rank])
    try:
        ours = launch._joined(store, me)
    except InputError as error:
        return str(error)
    except RuntimeError:
        return "nobody came"
    ours.set(f"said-{rank}", "x")
    return sorted(other for other in range(world_size) if ours.check([f"said-{other}"]))


@pytest.mark.multiprocess
def test_a_rank_of_another_job_on_the_same_store_is_told_and_joins_nothing(tmp_path):
    first, second = run_ranks(meet, 2, tmp_path, ["slurm-1.0.0", "slurm-2.0.0"])
    assert first == "nobody came"  # and so the first job waits for its own rank 1 only
    assert second.startswith("rank 1 of slurm-2.0.0 found another run")
    assert "set MASTER_PORT to a port of its own" in second
