"""When slurm/train.sbatch asks for another start; other commands stand in for Slurm's."""

import os
import platform
import re
import sys

import pytest

from tests.world import ROOT, run_command

pytestmark = pytest.mark.slurm

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
# When and where a line was written.
STAMP = re.compile(rf"^[0-9-]+T[0-9:]+[+-]\d\d:\d\d {re.escape(platform.node())}: ", re.MULTILINE)
LOST_PEER = "Connection closed by peer [127.0.0.1]:9"


@pytest.fixture
def start(tmp_path):
    """Start the job's script: its output, when srun ends with a code and a rank leaves a record."""
    (tmp_path / "rank.py").write_text(FAILING_RANK)
    folder = tmp_path / "run"

    def run(code, message="", job=12, restart=1, options=(), does="", ends_with=None, end=1 << 40):
        rank = f"{sys.executable} {tmp_path}/rank.py {folder} '{message}'" if message else ""
        commands = {
            "srun": f"{rank}\n{does}\nexit {code}",
            "squeue": "case $* in *%e) date +%FT%T ;; *) echo RUNNING ;; esac",
            "scontrol": 'echo "scontrol $@"\nkill -TERM $$ $PPID',  # as a requeue does
        }
        for name, body in commands.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        env = {"SLURM_JOB_ID": str(job), "SLURM_RESTART_COUNT": str(restart)}
        env["SLURM_JOB_NODELIST"] = "node[1-2]"
        env |= {"SLURM_JOB_END_TIME": str(end), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        line = ["bash", str(ROOT / "slurm/train.sbatch"), *options, "--out", str(folder)]
        done = run_command(line, env)
        assert done.returncode == (code if ends_with is None else ends_with)
        assert "Killed" not in done.stderr  # says bash of srun
        assert (folder / "failed-rank1.json").exists() or not message
        first, rest = STAMP.sub("", done.stdout).split("\n", 1)
        assert STAMP.match(done.stdout)
        assert first == f"job {job}, start {restart + 1}, on node[1-2]"
        return rest.removesuffix(f"exit code {code}\n")

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


# ---- where the run outlives a replica -------------------------------------------------------

GOSSIP = ["--strategy", "gossip"]
CHECKPOINT = "mkdir -p {0}/checkpoints/step-00000004"
RESCUE = "mkdir -p {0}/checkpoints/.rescue-9f3c"
SUMMARY = "mkdir -p {0}; echo > {0}/new; mv {0}/new {0}/summary.json"
DONE = "exit code 137 of a rank that was lost: the others have finished the run\n"
ALL_END = "--kill-on-bad-exit=1 --cpus-per-task=1 "
OTHERS_GO_ON = "--kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task=1 "


@pytest.mark.parametrize(
    ("options", "begin"),
    [
        (GOSSIP, OTHERS_GO_ON),
        (["--strategy=server"], OTHERS_GO_ON),
        (["--strategy=periodic"], ALL_END),
        ([], ALL_END),
    ],
)
def test_only_where_the_run_outlives_a_replica_does_the_step(start, options, begin):
    told = start(2, options=options, does='echo "$@"')
    assert told.startswith(begin)
    assert f"-m vigpipe.train {' '.join(options)}".rstrip() + " --out " in told


@pytest.mark.parametrize(
    ("text", "begin"),
    [('dp = 2\nstrategy = "gossip"\n', OTHERS_GO_ON), ('strategy = "periodic"\n', ALL_END)],
)
def test_the_strategy_may_stand_in_a_config_file(start, tmp_path, text, begin):
    config = tmp_path / "config.toml"
    config.write_text(text)
    for options in (["--config", str(config)], [f"--config={config}"]):
        assert start(2, options=options, does='echo "$@"').startswith(begin)
    told = start(2, options=["--config", str(config), *GOSSIP], does='echo "$@"')
    assert told.startswith(OTHERS_GO_ON)


def test_a_run_that_the_others_have_finished_is_done(start, tmp_path):
    summary = SUMMARY.format(tmp_path / "run")
    assert start(137, LOST_PEER, options=GOSSIP, does=summary, ends_with=0) == DONE
    # An earlier one, of which this start knows, and the same with another strategy.
    assert start(137, options=GOSSIP) == REQUEUED
    assert start(137, does=summary) == REQUEUED


def test_a_frozen_rank_does_not_keep_the_job_from_its_end(start, tmp_path):
    (tmp_path / "sleep").write_text("#!/bin/sh\n")  # time passes quickly
    (tmp_path / "sleep").chmod(0o755)
    waits = "\nexec tail -f /dev/null"
    ends = "not all ranks have ended: the job ends them\n"
    is_done = SUMMARY.format(tmp_path / "run") + waits
    assert start(137, options=GOSSIP, does=is_done, ends_with=0) == ends + DONE
    assert start(137, options=GOSSIP, does=waits, end=0) == ends + REQUEUED
    is_rescued = RESCUE.format(tmp_path / "run") + waits  # rank 0 is frozen
    assert start(137, options=GOSSIP, does=is_rescued) == ends + REQUEUED


def test_those_who_have_saved_are_started_again_however_often(start, tmp_path):
    options, saves = [*GOSSIP, "--items", "pool"], CHECKPOINT.format(tmp_path / "run")
    assert start(137, restart=5, options=options) == ""
    assert start(137, restart=5, options=options, does=saves) == REQUEUED
    assert start(137, restart=6, options=options, does=saves) == ""  # no new one
    rescues = RESCUE.format(tmp_path / "run")
    assert start(137, restart=7, options=options, does=rescues) == REQUEUED
    assert start(137, restart=8, options=options, does=rescues) == ""
    saves = saves.replace("4", "8")
    assert start(137, "the disk is full", options=options, does=saves) == ""
