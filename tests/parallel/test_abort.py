"""Collectives on GPUs are given up together, and nobody waits for that for ever."""

import threading

import pytest
import torch.distributed as dist

from tests.world import run_ranks
from vigpipe.parallel.abort import _nccl_backends, abort_all


class Backend:
    """Notes what it is asked for."""

    calls: list[str]

    def __init__(self, name: str, calls: list[str], hangs: threading.Event | None = None) -> None:
        self.name, self.calls, self.hangs = name, calls, hangs

    def _group_start(self) -> None:
        self.calls.append("start")

    def abort(self) -> None:
        self.calls.append(self.name)
        if self.hangs is not None:
            self.hangs.wait()

    def _group_end(self) -> None:
        self.calls.append("end")


def test_all_communicators_are_aborted_in_one_group():
    """One after the other they could wait for one another (pytorch/pytorch#119797)."""
    calls: list[str] = []
    abort_all([Backend("pipeline", calls), Backend("replicas", calls)], seconds=60)
    assert calls == ["start", "pipeline", "replicas", "end"]
    abort_all([], seconds=60)


def test_an_abort_that_hangs_is_left_behind():
    calls, hangs = [], threading.Event()
    abort_all([Backend("pipeline", calls, hangs)], seconds=0.01)
    assert calls == ["start", "pipeline"]
    hangs.set()


def groups_to_abort(rank: int, world_size: int) -> int:
    return len(_nccl_backends([None, dist.group.WORLD]))


@pytest.mark.multiprocess
def test_gloo_is_left_alone():
    assert run_ranks(groups_to_abort, 1) == [0]
