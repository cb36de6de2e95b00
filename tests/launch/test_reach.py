"""Ranks and hosts that cannot reach one another are named."""

import socket
import threading
import time

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
    monkeypatch.setattr(reach, "_NOTE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    here = socket.gethostname()
    match = (
        rf"^{here} has found no rank 0 at 127.0.0.1 port {port} for \d+ s \(Connection refused\)"
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


def test_ranks_that_do_not_come_are_named_on_all(monkeypatch, capsys):
    monkeypatch.setattr(reach, "_NOTE_SECONDS", 0.0)
    store, place = dist.HashStore(), ("host1", 29500)
    store.set("here/2", "")
    match = r"^rank 1 of 3 did not come to host1 port 29500 within \d+ s: start all ranks, and let"
    for rank in (0, 2):  # rank 0 finds it out
        with pytest.raises(UnreachableError, match=match):
            reach.await_ranks(store, on_host(rank), *place, SOON)
    assert "note: rank 0 waits at host1 port 29500 for rank 1 of 3" in capsys.readouterr().err
    store.set("here/1", "")
    for rank in (0, 1):
        reach.await_ranks(store, on_host(rank), *place, 60)


def test_a_name_must_lead_to_rank_0():
    here = socket.gethostname()
    local = f"^the name 'localhost' of rank 0's node means .* on {here}, which is {here} itself: "
    with pytest.raises(InputError, match=f"{local}set MASTER_ADDR to an address"):
        reach.check_name(on_host(1), "localhost", 1)
    # Here it does, and a rank that is not the first of its host cannot tell.
    for launch in (on_host(0), Launch(3, 4, 1, 2, "srun", "", "x")):
        reach.check_name(launch, "localhost", 1)


def test_hosts_that_others_cannot_reach_are_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(reach, "_HOST_SECONDS", SOON)

    def check(*others: object) -> None:
        """Check as one of several hosts; the others listen there, or say why not."""

        def decide(what, fact, choose):
            return choose([fact, None, *others] if what == "doors" else [fact, []])

        reach.check_hosts(on_host(0), decide)

    check()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check(("host2", "eth0", "127.0.0.1", port))
    match = f" cannot reach host2 at 127.0.0.1 port {port}, eth0 .connection refused.: set GLOO_SO"
    with pytest.raises(UnreachableError, match=match):
        check(("host2", "eth0", "127.0.0.1", port))
    many = [f"host{number} cannot listen" for number in range(5)]
    with pytest.raises(UnreachableError, match=r"^host0 .*; host2 cannot listen; and 2 more: set"):
        check(*many)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert reach.own_address() == ("lo", "127.0.0.1", socket.AF_INET)
