"""Every way of being started, read from its environment variables."""

import os
from dataclasses import replace

import pytest

from tests.refusals import check_refusals
from vigpipe.errors import InputError
from vigpipe.launch.environment import (
    FOLDER_VARIABLE,
    Launch,
    expand_nodes,
    expand_tasks,
    from_environment,
    threads_per_rank,
)

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


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, Launch(3, 4, 1, 2, "torchrun", "env://", "run7")),
        (
            {**TORCHRUN, FOLDER_VARIABLE: "/tmp/vigpipe-x"},
            Launch(3, 4, 1, 2, "local", "file:///tmp/vigpipe-x/ranks", "vigpipe-x"),
        ),
        (SRUN, Launch(3, 4, 0, 1, "srun", "tcp://node1:21215", "slurm-12.3.0")),
        (
            {**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"},
            Launch(2, 4, 2, 3, "srun", "tcp://node1:21215", "slurm-12.3.0"),
        ),
        ({**SRUN, **ONE_NODE}, Launch(3, 4, 3, 4, "srun", "tcp://127.0.0.1:21215", "slurm-12.3.0")),
        (
            {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5", "SLURM_RESTART_COUNT": "1"},
            Launch(3, 4, 0, 1, "srun", "tcp://10.0.0.1:5", "slurm-12.3.1"),
        ),
        # torchrun inside an srun step
        ({**SRUN, **TORCHRUN}, Launch(3, 4, 1, 2, "torchrun", "env://", "run7")),
    ],
)
def test_ranks_of_every_launcher(env, expected):
    assert from_environment(env) == expected


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": ""},
        # plain python in a batch script of four tasks
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_a_process_that_is_alone(env):
    me = from_environment(env)
    assert (me.rank, me.world_size, me.launcher, me.init_method) == (0, 1, "alone", None)
    assert me.is_local


def test_is_local_only_if_all_ranks_are_on_this_host():
    assert from_environment({**SRUN, **ONE_NODE}).is_local
    assert not from_environment(SRUN).is_local


REFUSED = [  # variables of a start, a change to them, and what is said
    (TORCHRUN, {"RANK": "4"}, "RANK=4: expected a whole number from 0 to 3"),
    (TORCHRUN, {"RANK": "٣"}, "RANK=٣: expected"),
    (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected a whole number from 1 to"),
    (TORCHRUN, {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5: expected"),
    (TORCHRUN, {"LOCAL_RANK": "2"}, "LOCAL_RANK=2: expected a whole number from 0 to 1"),
    (TORCHRUN, {"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
    (TORCHRUN, {"MASTER_PORT": None}, "MASTER_PORT is not set"),
    (SRUN, {"SLURM_STEP_NUM_TASKS": "4.0"}, r"SLURM_STEP_NUM_TASKS=4\.0: expected"),
    (SRUN, {"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1: expected"),
    (SRUN, {"SLURM_NODEID": "2"}, "SLURM_NODEID=2: expected"),
    (SRUN, {"SLURM_PROCID": "0"}, "SLURM_NODEID=1: expected rank 0 .* set MASTER_ADDR"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "5"}, "5 tasks in"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "4"}, "expected 2 nodes .* got 1 nodes"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_STEP_TASKS_PER_NODE=2\(x: expected"),
    (SRUN, {"SLURM_STEP_NODELIST": "node[1-"}, r"SLURM_STEP_NODELIST=node\[1-: expected"),
    (TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT=0: expected a whole number from 1 to 65535"),
    (TORCHRUN, {"WORLD_SIZE": "9" * 18}, "WORLD_SIZE=9+: expected a whole number from 1 to"),
    (TORCHRUN, {"RANK": "9" * 4000}, "^RANK=9{134}…9{66}: expected a whole number"),
    (TORCHRUN, {"RANK": "1\n2"}, r"^RANK=1\\n2: expected a whole number"),
    ({}, {"RANK": "0"}, "RANK=0: expected WORLD_SIZE beside it, .* or unset RANK"),
    ({}, {"WORLD_SIZE": "2"}, "WORLD_SIZE=2: expected RANK beside it"),
    # These filled the memory and took a minute.
    (SRUN, {"SLURM_STEP_NUM_TASKS": "9" * 9}, "SLURM_STEP_NUM_TASKS=9+: expected"),
    (SRUN, {"SLURM_STEP_NODELIST": "n[1-999999999]"}, r"=n\[1-9+\]: expected at most 4 nodes"),
    (SRUN, {"SLURM_STEP_NODELIST": "n[1-3,1-3]"}, "expected at most 4 nodes"),
    (SRUN, {"SLURM_STEP_NODELIST": "n[1-4][1-4]"}, "expected at most 4 nodes"),
    (SRUN, {"SLURM_STEP_NODELIST": f"n[1-{'9' * 5000}]"}, "expected '1-9.* to be a range"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "expected at most 4 nodes"),
    (SRUN, {"MASTER_PORT": "65536"}, "MASTER_PORT=65536: expected"),
]


def test_errors_name_the_variable():
    def read(base, change):
        env = {**base, **change}
        from_environment({name: text for name, text in env.items() if text is not None})

    check_refusals(REFUSED, read)


# ---- Slurm's lists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[1-3,07-09],gpu1", ["node1", "node2", "node3", "node07", "node08", "node09", "gpu1"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("rack[1-2]n[5,7]", ["rack1n5", "rack1n7", "rack2n5", "rack2n7"]),
    ],
)
def test_expand_nodes(text, names):
    assert expand_nodes(text) == names


def test_expand_nodes_refuses():
    for text in ("", "a,,b", "a[]", "a]", "a[1-]", "a[3-1]", "a[x]", "a b", "a[1-[2]]"):
        with pytest.raises(InputError, match="SLURM_STEP_NODELIST"):
            expand_nodes(text)


def test_expand_tasks_undoes_slurms_abbreviation():
    assert expand_tasks("3,1") == [3, 1]
    assert expand_tasks("2(x3),14,1(x2)") == [2, 2, 2, 14, 1, 1]


def test_the_store_port_depends_on_the_step_and_is_below_the_ephemeral_range():
    ports = set()
    for job in (0, 1, 54321, 2**31):
        for step in (0, 1):
            env = {**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            _, _, port = (from_environment(env).init_method or "").rpartition(":")
            ports.add(int(port))
    assert len(ports) == 8
    assert 1024 < min(ports) < max(ports) < 32768


# ---- threads


def test_threads_per_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    two = replace(from_environment(SRUN), local_world_size=2)
    cpus = {"SLURM_CPUS_PER_TASK": "5"}
    assert threads_per_rank(3, 2, {"OMP_NUM_THREADS": "7"}) == 3
    assert threads_per_rank(None, 2, {"OMP_NUM_THREADS": "7,2"}) == 7
    assert threads_per_rank(None, two, cpus) == 5
    assert threads_per_rank(None, 2, cpus) == 4  # ranks of our own in a batch script
    assert threads_per_rank(None, two, {}) == 4
    assert threads_per_rank(None, 3, {}) == 2
    assert threads_per_rank(None, 16, {"OMP_NUM_THREADS": ""}) == 1
    assert threads_per_rank(None, 2, {"OMP_NUM_THREADS": "512"}) == 512  # set for a larger host


def test_threads_per_rank_refuses(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 40)
    rows = [
        (0, {}, "--threads 0: expected a whole number from 1 to 640"),
        (641, {}, "--threads 641: expected a whole number from 1 to 640"),
        (None, {"OMP_NUM_THREADS": "641"}, "OMP_NUM_THREADS=641: expected a whole number"),
        (None, {"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS=many: expected"),
        (None, {"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS=0: expected"),
    ]
    check_refusals(rows, lambda requested, env: threads_per_rank(requested, 1, env))


def test_a_token_keeps_ranks_of_another_start_apart_and_is_not_shown():
    env = {**SRUN, "VIGPIPE_TOKEN": "secret of this start"}
    run_id = from_environment(env).run_id
    assert run_id.startswith(f"{from_environment(SRUN).run_id}.")
    assert "secret" not in run_id
    assert run_id == from_environment(env).run_id
    assert run_id != from_environment({**env, "VIGPIPE_TOKEN": "of another"}).run_id
