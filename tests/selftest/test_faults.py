"""Which faults happen, and what is wrong with how a run ends after one."""

import signal

from tests.selftest.made_up import CPU, machine
from vigpipe.selftest import faults

SEEN = {
    "code": 137,
    "told": "vigpipe: rank 1 was ended by SIGKILL; out of memory?",
    "seconds": 2.0,
    "checkpoint": "step-00000005",
    "resumed": True,
}


def test_ranks_are_on_two_gpus_if_there_are_two():
    for which, devices in ((CPU, ["cpu"] * 2), (machine(2), ["cuda"] * 2)):
        found = faults.faults(which)
        assert [fault.device for fault in found] == devices
        assert [(fault.signal, fault.code) for fault in found] == [
            (signal.SIGKILL, 137), (signal.SIGSTOP, 70)
        ]  # fmt: skip


def test_the_rank_of_a_single_gpu_is_killed_too():
    alone, *others = faults.faults(machine(1))
    assert (alone.num_ranks, alone.device, alone.signal) == (1, "cuda", signal.SIGKILL)
    assert others == faults.faults(CPU)


def test_a_run_that_ends_as_it_should_passes_and_others_fail():
    killed = faults.faults(CPU)[0]
    row = faults.judge(killed, SEEN)
    assert (row.outcome, row.note, row.values) == ("passed", "", SEEN)
    for change, note in (
        ({"code": 134}, "it ended with 134 instead of 137"),
        ({"told": "Segmentation fault"}, "its last line does not name the rank"),
        ({"told": "vigpipe: rank 10 lost a peer"}, "its last line does not name the rank"),
        ({"resumed": False}, "it did not go on from its checkpoint"),
    ):
        row = faults.judge(killed, SEEN | change)
        assert (row.outcome, row.note) == ("failed", note)
    # A lone rank has nobody who names it.
    assert faults.judge(faults.faults(machine(1))[0], SEEN | {"told": ""}).outcome == "passed"
