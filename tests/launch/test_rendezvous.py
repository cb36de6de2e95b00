"""The ranks of a run meet, and strangers are kept out."""

import os
import socket
import threading
import time
from collections.abc import Set
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launch.parrot import Parrot, listening
from tests.launch.test_environment import ONE_NODE, SRUN, TORCHRUN
from tests.refusals import check_refusals
from tests.world import run_ranks
from vigpipe.errors import InputError
from vigpipe.launch import device, rendezvous
from vigpipe.launch.environment import Launch, from_environment
from vigpipe.launch.failures import LOST_PEER
from vigpipe.parallel.layout import Layout, make_groups
from vigpipe.parallel.values import all_gather_values, broadcast_value


def test_where_ranks_cannot_meet_they_are_told_what_to_set(monkeypatch):
    lo, eth77 = ({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "eth77"))
    nowhere = {**SRUN, "SLURM_STEP_NODELIST": "no-such-node.invalid,other"}
    # torch tried for as long as ranks may start late, and said so between its C++ frames.
    of_torchrun = {**TORCHRUN, "MASTER_ADDR": "no such\x1b[2J node"}
    on_one_node = {**SRUN, **ONE_NODE, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}

    def meet(env, others):
        with monkeypatch.context() as patch:
            patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
            for name, text in {**env, **others}.items():
                patch.setenv(name, text)
            rendezvous.init_process_group(from_environment(env), "gloo", 5)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        on_one_node["MASTER_PORT"] = port = str(taken.getsockname()[1])
        rows = [
            (nowhere, {}, r"'no-such-node.invalid'.* set MASTER_ADDR"),
            (of_torchrun, {}, r"'no such\\x1b\[2J node'.* --local-addr"),
            (on_one_node, lo, f"port {port} .* set MASTER_PORT"),
            ({}, eth77, "GLOO_SOCKET_IFNAME=eth77: no interface 'eth77'"),
        ]
        check_refusals(rows, meet)


def meet_as_srun(rank: int, world_size: int, port: int, job: int) -> tuple[int, list[str]]:
    """Leave the test's world, meet again as ranks of srun on one node; list open sockets."""
    dist.destroy_process_group()
    env = {**SRUN, **ONE_NODE, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    env |= {"SLURM_STEP_NUM_TASKS": str(world_size), "SLURM_JOB_ID": str(job)}
    env |= {"SLURM_STEP_TASKS_PER_NODE": str(world_size), "MASTER_PORT": str(port)}
    rendezvous.init_process_group(from_environment(env), "gloo", 20)
    return sum(all_gather_values(rank, world_size)), list(listening().values())


@pytest.mark.multiprocess
def test_a_one_node_step_listens_on_loopback_only():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for total, addresses in run_ranks(meet_as_srun, 2, port, 12):
        assert total == 1
        assert set(addresses) == {"0100007F"}  # 127.0.0.1


def meet_after_a_stranger(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    """Meet again; before rank 1 comes, somebody takes its place and repeats what rank 0 says.

    Which of two ranks connects to the other depends on their ports, so that this is tried again.
    """
    dist.destroy_process_group()
    for attempt in range(32):
        url = (folder / f"again-{attempt}").as_uri()
        me = Launch(rank, world_size, rank, world_size, "local", url, "again")
        store, stranger = rendezvous.meet(me, 20), Parrot()
        if rank == 0:
            come = (store, stranger, listening().keys(), range(2 * world_size))
            threading.Thread(target=come_first, args=come, daemon=True).start()
        else:
            store.wait(["somebody has come"])
        try:
            rendezvous.init_process_group(me, "gloo", 20, store)
        except RuntimeError as error:
            return type(error).__name__, str(error)
        dist.destroy_process_group()
    return "", ""


def come_first(store: dist.Store, stranger: Parrot, before: Set[int], pairs: range) -> None:
    """Connect to the next port on which this process listens, and say so."""
    try:
        while not (ports := listening().keys() - before):
            time.sleep(0.01)
        for port in ports:
            stranger.take("127.0.0.1", port, pairs)
        while not stranger.is_heard():
            time.sleep(0.01)
    finally:
        store.set("somebody has come", "")


@pytest.mark.multiprocess
def test_a_stranger_who_takes_the_place_of_a_rank_is_found_out(tmp_path):
    """Whoever connected first was the peer, and what it sent was unpickled."""
    (kind, said), (other_kind, lost) = run_ranks(meet_after_a_stranger, 2, tmp_path)
    assert kind == "StrangerError"
    assert "has the place of rank 1" in said
    assert other_kind == "RuntimeError"
    assert LOST_PEER.search(lost)


COLLECTIVE_SECONDS = 2.0


def as_torchrun(rank: int, port: int, restart: int = 0) -> Launch:
    """Leave the test's world to meet again as ranks of torchrun, whose store has that port."""
    dist.destroy_process_group()
    env = {**TORCHRUN, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restart)}
    os.environ.update(env)
    return from_environment(env)


def meet_late_as_torchrun(rank: int, world_size: int, port: int) -> str:
    """Rank 1 comes later than a collective would wait, and leaves rank 0 alone in one."""
    me = as_torchrun(rank, port)
    words = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == 0:
        words.set("rank 0 is waiting", "")
    else:
        words.wait(["rank 0 is waiting"])
        time.sleep(1.5 * COLLECTIVE_SECONDS)
    rendezvous.init_process_group(me, "gloo", COLLECTIVE_SECONDS)
    if rank == 1:
        words.wait(["rank 0 has given up"])
        return ""
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    finally:
        words.set("rank 0 has given up", "")
    return "the barrier was passed"


@pytest.mark.multiprocess
def test_torchruns_late_ranks_are_waited_for_longer_than_a_collective():
    """The timeout of collectives was that of torchrun's rendezvous as well: 60 s in training."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said, _ = run_ranks(meet_late_as_torchrun, 2, agent.port)
    assert "2000ms" in said


def meet_again_as_torchrun(rank: int, world_size: int, port: int) -> list[int]:
    """Meet as torchrun's ranks, and again after a restart, in the order that is hardest."""
    words = dist.TCPStore("127.0.0.1", port, is_master=False)
    sums = []
    for restart in range(2):
        me = as_torchrun(rank, port, restart * rank)  # each agent counts its own restarts
        if rank == 0 and restart:
            words.wait(["rank 1 is waiting"])
        elif restart:
            words.set("rank 1 is waiting", "")
        rendezvous.init_process_group(me, "gloo", 20)
        sums.append(sum(all_gather_values(rank + restart, world_size)))
    return sums


@pytest.mark.multiprocess
def test_ranks_of_torchrun_meet_again_after_a_restart():
    """torchrun keeps its store, and what the ranks of the start before have written there."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(meet_again_as_torchrun, 2, agent.port) == [[1, 3], [1, 3]]


def meet_over_two_backends(rank: int, world_size: int, folder: Path):
    """Meet as ranks on GPUs do, with torch's fake backend in place of NCCL."""
    import torch
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake"

    dist.destroy_process_group()
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    place = (rank, world_size, rank, world_size, "local", (folder / "again").as_uri(), "again")
    backend = device.backend(torch.device("cuda")).replace("nccl", "fake")
    rendezvous.init_process_group(Launch(*place), backend, 20)
    groups = make_groups(Layout(2, num_replicas=2), 20)
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=groups.pipeline)
    dist.barrier()
    names = [name for name in os.environ if "NCCL" in name or "GLOO" in name]
    return (
        broadcast_value(rank + 5, world_size),
        all_gather_values(rank, world_size),
        total.item(),
        all_gather_values(f"rank {rank}", 2, groups.replicas),
        {name: os.environ[name] for name in names},
    )


@pytest.mark.multiprocess
def test_ranks_on_gpus_exchange_values_of_the_host_over_gloo(tmp_path):
    """Such values were copied to the GPU for NCCL; "fake" hands on nothing, so gloo served."""
    found = run_ranks(meet_over_two_backends, 4, tmp_path)
    for rank, (first, everybody, total, replicas, variables) in enumerate(found):
        assert (first, everybody) == (5, [0, 1, 2, 3])
        assert total == (1.0 if rank < 2 else 5.0)  # of ranks 0 and 1, or of 2 and 3
        assert replicas == [f"rank {rank % 2}", f"rank {rank % 2 + 2}"]
        # A lost peer does not abort the others, and no socket is open to the network.
        assert variables == {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
        }


def test_the_users_choice_of_an_interface_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth77")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous.meet(from_environment({}), 5)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth77"


def meet(rank, world_size, folder, jobs):
    """Join a store that all ranks share, as a rank of one of the jobs."""
    store = dist.FileStore(str(folder / "shared"))
    store.set_timeout(timedelta(seconds=2))
    me = Launch(rank, world_size, rank, world_size, "srun", "tcp://127.0.0.1:1", jobs[rank])
    try:
        ours = rendezvous._joined(store, me, 2)
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
