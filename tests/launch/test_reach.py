"""Ranks and hosts that cannot reach one another are named."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from vigpipe.errors import InputError, UnreachableError
from vigpipe.launch import reach
from vigpipe.launch.environment import Launch

SOON = 0.3


def on_host(rank: int, world_size: int = 3) -> Launch:
    """A rank that is alone on its host."""
    return Launch(rank, world_size, 0, 1, "torchrun", "env://", "x")


def test_the_place_where_ranks_meet_may_come_late(monkeypatch, capsys):
    monkeypatch.setattr(reach, "is_loopback", lambda address: False)
    monkeypatch.setattr(reach, "_NOTE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    here = socket.gethostname()
    match = (
        rf"^{here} has found no rank 0 at 127.0.0.1 port {port} for 0.3 s \(Connection refused\)"
    )
    with pytest.raises(UnreachableError, match=match):
        reach.await_meeting_place(on_host(1), "127.0.0.1", port, SOON)
    assert f"note: {here} waits for rank 0 at 127.0.0.1 port {port}" in capsys.readouterr().err

    def come() -> None:
        time.sleep(SOON)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()[0].close()

    thread = threading.Thread(target=come)
    thread.start()
    reach.await_meeting_place(on_host(1), "127.0.0.1", port, 60)
    thread.join()


def meet(store, launch, seconds=60.0):
    return reach.meet_all(store, launch, "host1", 29500, seconds)


def test_ranks_that_do_not_come_are_named_on_all(monkeypatch, capsys):
    monkeypatch.setattr(reach, "_NOTE_SECONDS", 0.0)
    store = dist.HashStore()
    match = r"^rank 1 of 3 did not come to host1 port 29500 within 0.3 s: start all ranks, and let"
    with ThreadPoolExecutor() as pool:
        told = [pool.submit(meet, store, on_host(rank), SOON) for rank in (0, 2)]
    for future in told:
        with pytest.raises(UnreachableError, match=match):
            future.result()
    assert "note: rank 0 waits at host1 port 29500 for rank" in capsys.readouterr().err


def test_ranks_of_an_earlier_meeting_are_not_taken_for_those_of_this(monkeypatch):
    """The store of torchrun's agent is the same after its ranks have been started again."""
    monkeypatch.setattr(reach, "_READ_SECONDS", 0.0)
    store = dist.HashStore()
    names = []
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            met = [pool.submit(meet, store, on_host(rank)) for rank in range(3)]
        (name,) = {future.result() for future in met}
        names.append(name)
    assert names[0] != names[1]
    with pytest.raises(UnreachableError, match=r"^ranks 1, 2 of 3 did not come"):
        meet(store, on_host(0), SOON)


def test_a_name_must_lead_to_rank_0():
    with pytest.raises(
        InputError, match=r"^the name 'no-such-host.invalid' .* does not resolve on"
    ):
        reach.check_name(on_host(1), "no-such-host.invalid", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # As where several pretend hosts are one machine.
        reach.await_meeting_place(on_host(1), "localhost", port, SOON)
    with pytest.raises(InputError, match=rf"^rank 0 listens on .* localhost port {port} does not"):
        reach.check_own("localhost", port)
    here = socket.gethostname()
    match = (
        f"^the name 'localhost' of rank 0's node means .* on {here}, which is {here} itself, and"
    )
    with pytest.raises(InputError, match=match):
        reach.await_meeting_place(on_host(1), "localhost", port, SOON)
    # A rank that is not the first of its host cannot tell.
    second = Launch(3, 4, 1, 2, "srun", "", "x")
    with pytest.raises(UnreachableError):
        reach.await_meeting_place(second, "localhost", port, SOON)


def test_hosts_that_others_cannot_reach_are_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(reach, "_HOST_SECONDS", SOON)

    def check(*others: object) -> None:
        """Check as one of several hosts; the others listen there, or say why not."""

        def decide(what, fact, choose):
            return choose([fact, None, *others] if what == "doors" else [fact or [], []])

        reach.check_hosts(on_host(0), decide)

    check()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check(("host2", "eth0", "127.0.0.1", port))
    match = f" cannot reach host2 at 127.0.0.1 port {port}, eth0 .connection refused.: set GLOO_SO"
    with pytest.raises(UnreachableError, match=match):
        check(("host2", "eth0", "127.0.0.1", port))
    with pytest.raises(UnreachableError, match=r"^host2 cannot listen"):
        check("host2 cannot listen", "host3 cannot listen")
    many = [[f"host{number} cannot reach host9"] for number in range(5)]
    assert reach._summary(many).startswith("host0 cannot reach host9; ")
    assert "; host2 cannot reach host9; and 2 more: set GLOO_SOCKET_IFNAME" in reach._summary(many)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert reach.own_address() == ("lo", "127.0.0.1", socket.AF_INET)
