"""Gloo uses the interface that leads to where the ranks meet."""

import os

import pytest
import torch.distributed as dist

from vigpipe.launch import interface
from vigpipe.launch.environment import Launch

INTERFACES = {"lo": {"127.0.0.1", "::1"}, "ib0": {"10.1.0.1"}, "eth0": {"10.0.0.1", "fd00::1"}}


@pytest.mark.parametrize(
    ("route", "told", "chosen"),
    [
        (("10.0.0.1", "10.0.0.2"), ["", ""], "eth0"),
        (("fd00::1", "fd00::2"), ["", ""], "eth0"),
        # On the meeting place itself: the others say at which address it is.
        (("127.0.0.1", "127.0.1.1"), ["", "10.1.0.1"], "ib0"),
        (("127.0.0.1", "127.0.1.1"), ["", ""], None),
        (("10.9.9.9", "10.0.0.2"), ["", ""], None),
        (OSError("Network is unreachable"), ["", ""], None),
    ],
)
def test_it_is_the_one_that_leads_to_the_meeting_place(monkeypatch, route, told, chosen):
    def find(host):
        if isinstance(route, OSError):
            raise route
        return route

    monkeypatch.setattr(interface, "_route", find)
    monkeypatch.setattr(interface, "_interfaces", lambda: INTERFACES)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store, me = dist.HashStore(), Launch(0, 2, 0, 1, "torchrun", "env://", "x.0")
    for rank, address in enumerate(told):
        store.set(f"meets-at/{rank}", address)
    interface.use_route(store, me, "host1")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    interface.use_route(store, me, "host1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # the user's word


def test_both_ends_of_a_route_are_told():
    assert interface._route("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert "127.0.0.1" in interface._interfaces()["lo"]
