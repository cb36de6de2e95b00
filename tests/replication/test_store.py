"""A store that is gone, or does not answer, is noticed by whoever calls it."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.world import start_command, wait_until
from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.agreement import Peers
from vigpipe.replication import store
from vigpipe.replication.decisions import Action, Decision, Decisions
from vigpipe.replication.store import StoreLostError, WatchedStore

HOST = """
import signal
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_killed_or_frozen_is_lost_to_all_calls(number):
    with start_command([sys.executable, "-c", HOST]) as host:
        told = host.folder / "stdout"
        wait_until(lambda: told.read_text().endswith("\n"), "it tells its port", running=host)
        tcp = dist.TCPStore("127.0.0.1", int(told.read_text()), is_master=False)
        watched = WatchedStore(dist.PrefixStore("run", tcp), timeout_seconds=1)
        watched.set("a", "1")
        assert (watched.get("a"), watched.add("n", 2)) == (b"1", 2)
        assert watched.check(["a", "n"])
        assert watched.compare_set("a", "1", "2") == b"2"
        os.kill(host.popen.pid, number)

        def go_on_calling() -> None:  # a process is stopped a moment after the signal was sent
            while True:
                watched.get("a")

        with pytest.raises(StoreLostError) as lost:
            go_on_calling()
        assert is_lost_peer(lost.value)
        with pytest.raises(StoreLostError):
            watched.set("a", "3")
        watched.close()


def test_all_ranks_of_a_replica_hear_of_it_with_the_next_decision():
    def decide():
        yield Decision(Action.TAKE, 3)
        yield None
        raise StoreLostError

    decisions = Decisions(Peers())
    decisions.begin(decide(), lambda: None)
    assert decisions.next().number == 3
    with pytest.raises(StoreLostError):
        decisions.next()


def test_a_rank_that_was_stopped_itself_gives_the_store_time_to_answer(monkeypatch):
    """As Slurm stops and continues all ranks of a job that it suspends."""
    left, now, closed = [0.0, 0.5, 100.0, 100.5, 101.0, 101.5], [0.0], []

    def look() -> float:
        now[0] = left.pop(0)
        return now[0]

    watched = WatchedStore(dist.HashStore(), timeout_seconds=1)
    watched._begun[0] = 0.2  # when a call was begun
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=look))
    monkeypatch.setattr(store, "_close_connections", lambda port: closed.append(now[0]))
    monkeypatch.setattr(watched._ends, "wait", lambda seconds: not left)
    watched._watch(port=1)
    assert closed == [101.5]  # 1.5 s after it went on
