"""Collectives on GPUs are given up together, and nobody waits for that for ever."""

import threading

import pytest
import torch.distributed as dist

from tests.world import run_ranks
from vigpipe.parallel.abort import _nccl_backends, abort_all


class Backend:
    """A communicator whose abort waits for that of another one."""

    def __init__(self) -> None:
        self.is_aborted, self.waits_for = threading.Event(), threading.Event()
        self.waits_for.set()

    def abort(self) -> None:
        self.is_aborted.set()
        self.waits_for.wait()


def test_communicators_whose_aborts_wait_for_one_another_are_aborted_together():
    """One after the other, the first would wait for ever (pytorch/pytorch#119797)."""
    first, second = Backend(), Backend()
    first.waits_for, second.waits_for = second.is_aborted, first.is_aborted
    abort_all([first, second], seconds=60)
    assert first.is_aborted.is_set()
    assert second.is_aborted.is_set()
    abort_all([], seconds=60)


def test_an_abort_that_hangs_is_left_behind():
    backend = Backend()
    backend.waits_for = threading.Event()
    abort_all([backend], seconds=0.01)
    backend.waits_for.set()


def groups_to_abort(rank: int, world_size: int) -> int:
    return len(_nccl_backends([None, dist.group.WORLD]))


@pytest.mark.multiprocess
def test_gloo_is_left_alone():
    assert run_ranks(groups_to_abort, 1) == [0]
