"""When slurm/train.sbatch asks for another start; other commands stand in for Slurm's."""

import os
import sys

import pytest

from tests.world import ROOT, run_command

# A step of two ranks, of which the second one fails and leaves its record.
FAILING_RANK = """
import os, sys
from pathlib import Path
from vigpipe.launch.failures import run_rank
from vigpipe.launch.environment import from_environment

def work():
    raise RuntimeError(sys.argv[2])

step = dict(STEP_ID="0", STEP_NUM_TASKS="2", STEP_TASKS_PER_NODE="2", STEP_NODELIST="node1",
            NODEID="0", PROCID="1", LOCALID="1")
launch = from_environment(os.environ | {f"SLURM_{name}": text for name, text in step.items()})
run_rank(work, launch, [Path(sys.argv[1])])
"""
LOST_PEER = "Connection closed by peer [127.0.0.1]:9"


@pytest.fixture
def start(tmp_path):
    """Start the job's script: its output, when srun ends with a code and a rank leaves a record."""
    (tmp_path / "rank.py").write_text(FAILING_RANK)
    folder = tmp_path / "run"

    def run(code, message="", job=12, restart=1):
        rank = f"{sys.executable} {tmp_path}/rank.py {folder} '{message}'" if message else ""
        commands = {
            "srun": f"{rank}\nexit {code}",
            "squeue": "echo RUNNING",
            "scontrol": 'echo "scontrol $@"\nkill -TERM $$ $PPID',  # as a requeue does
        }
        for name, body in commands.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        env = {"SLURM_JOB_ID": str(job), "SLURM_RESTART_COUNT": str(restart)}
        env |= {"SLURM_JOB_END_TIME": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = run_command(["bash", str(ROOT / "slurm/train.sbatch"), "--out", str(folder)], env)
        assert done.returncode == code
        assert (folder / "failed-rank1.json").exists() or not message
        return done.stdout

    return run


REQUEUED = "scontrol requeue 12\nexit code 137: job 12 is requeued\n"


@pytest.mark.parametrize("code", [70, 134, 137])
def test_a_job_that_lost_a_rank_is_requeued(start, code):
    requeued = REQUEUED.replace("137", str(code))
    assert start(code) == requeued
    assert start(code, LOST_PEER) == requeued


def test_a_job_whose_rank_has_a_fault_of_its_own_is_not(start):
    assert start(137, "the disk of rank 1 is gone") == ""
    assert start(1) == ""


@pytest.mark.parametrize("earlier", [{"restart": 0}, {"job": 112}, {"job": 1}])
def test_a_fault_of_an_earlier_start_keeps_no_job_from_being_requeued(start, earlier):
    """An elastic job started again with fewer ranks, and the record of a rank it had no more
    stayed in the folder; so does that of a rank whose node is lost before it begins.
    """
    assert start(1, "the disk of rank 1 is gone", **earlier) == ""
    assert start(137) == REQUEUED
