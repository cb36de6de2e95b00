"""Runs of slurm/train.sbatch that go on without a replica that is lost, on a Slurm of two nodes."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.slurm.test_faults_srun import ENV, batch, local
from tests.small_digits import NUM_TEST, SMALL_DIGITS
from tests.world import run_command, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]

STEPS = 12
OPTIONS = [*SMALL_DIGITS, "--batch-size", "24", "--steps", str(STEPS), "--threads", "1"]
OPTIONS += ["--dp", "2", "--timeout", "10"]  # no rank of a busy machine takes as long
GOSSIP = [*OPTIONS, "--strategy", "gossip", "--average-every", "3"]

# Stands for `python -m vigpipe.train ARGUMENTS`. In the first start of the job, some ranks stay in
# one of their steps until the test ends them.
HELD = """
import os, runpy, sys, threading
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
rank, steps = os.environ["SLURM_PROCID"], []
def hold(*_):
    steps.append(None)
    if len(steps) == {step}:
        Path("held-" + rank).write_text(str(os.getpid()) + "\\n")
        threading.Event().wait()
if int(rank) in {ranks} and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    register_optimizer_step_post_hook(hold)
sys.argv = sys.argv[2:]
runpy.run_module("vigpipe.train", run_name="__main__", alter_sys=True)
"""

# Stands for the same without the job's script: rank 1 is slow to look whether all have done the
# last that they do together.
LATE = """
import os, runpy, time
from vigpipe.replication import membership
report = membership._report
def report_late(*arguments):
    steps = report(*arguments)
    yield next(steps, None)
    time.sleep(3)
    yield from steps
if os.environ["SLURM_PROCID"] == "1":
    membership._report = report_late
runpy.run_module("vigpipe.train", run_name="__main__", alter_sys=True)
"""


def held(folder: Path, rank: int) -> int:
    """Wait until a rank is held in its step: its process id."""
    file = folder / f"held-{rank}"
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"), f"rank {rank} is held")
    return int(file.read_text())


def is_done_without(lost: int, folder: Path) -> None:
    """Every item was done, and the run's files say who was lost."""
    events = [json.loads(text) for text in (folder / "events.jsonl").read_text().splitlines()]
    items = {event["item"] for event in events if "item" in event and "did" not in event}
    assert items == set(range(2 * STEPS))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["replicas"]["lost"] == [lost]
    assert summary["test"]["images"] == NUM_TEST


def test_a_killed_rank_does_not_end_the_job(slurm, tmp_path):
    arguments = [*GOSSIP, "--items", "pool"]
    with batch(slurm, tmp_path, [], arguments, HELD.format(step=2, ranks=[1])) as job:
        os.kill(held(tmp_path, 1), signal.SIGKILL)
        folder = tmp_path / "runs" / job.number
        facts = job.completes(folder)
    assert (facts["Restarts"], facts["ExitCode"]) == ("0", "0:0")
    assert job.tells("exit code 137 of a rank that was lost: the others have finished the run")
    is_done_without(1, folder)


def test_a_lost_node_does_not_end_a_job_that_was_sent_with_no_kill(slurm, tmp_path):
    try:
        with batch(slurm, tmp_path, ["--no-kill"], GOSSIP, HELD.format(step=2, ranks=[1])) as job:
            held(tmp_path, 1)
            local(slurm, "fail", "node2")
            folder = tmp_path / "runs" / job.number
            facts = job.completes(folder)
        assert (facts["Restarts"], facts["ExitCode"]) == ("0", "0:0")
        is_done_without(1, folder)
    finally:
        local(slurm, "start")


def test_rank_0_stays_until_the_others_know_that_all_is_done(slurm, tmp_path):
    """The store was gone with it, and a rank that was slower ended with 70 after all."""
    folder = tmp_path / "run"
    line = ["srun", "-N2", "-n2", "--kill-on-bad-exit=1", sys.executable, "-c", LATE]
    done = run_command([*line, *GOSSIP, "--out", str(folder)], {**slurm, **ENV})
    assert done.returncode == 0, done.stderr
    assert (folder / "summary.json").exists()


def test_without_rank_0_the_job_goes_on_from_what_the_other_has_saved(slurm, tmp_path):
    """The store where the ranks meet is gone with it."""
    arguments = [*GOSSIP, "--items", "pool", "--checkpoint-every", "1000"]
    with batch(slurm, tmp_path, [], arguments, HELD.format(step=2, ranks=[0])) as job:
        process = held(tmp_path, 0)
        folder = tmp_path / "runs" / job.number
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: job.tells("is requeued"), "it is requeued")
        facts = job.completes(folder)
    assert (facts["Restarts"], facts["ExitCode"]) == ("1", "0:0")
    assert job.tells(f"exit code 137: job {job.number} is requeued")
    assert job.tells("replica 1 has saved what it has; go on with --out ")
    assert job.tells("going on after step ")
    assert "lost" not in json.loads((folder / "summary.json").read_text())["replicas"]
