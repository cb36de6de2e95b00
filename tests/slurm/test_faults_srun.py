"""The faults of a cluster, on the pretend nodes of slurm/local.sh.

Preemption, a time limit, lost and silent nodes: what is told, how soon, that nothing is left
running, and that the run's losses are in the end those of a run that nothing has happened to.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.faults.test_faults import at_step, is_the_same, losses
from tests.slurm.conftest import LOCAL
from tests.small_digits import SMALL_DIGITS, write_small_digits
from tests.world import (
    GUARD,
    PROMPT,
    ROOT,
    Command,
    free_ports,
    run_command,
    start_command,
    wait_until,
)
from vigpipe.checkpoint.manifest import list_checkpoints
from vigpipe.cli import main
from vigpipe.run.stragglers import WARM_UP, WINDOW

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]

# Ranks under Slurm are fresh processes, and scikit-learn's digits take them another second.
OPTIONS = [*SMALL_DIGITS, "--batch-size", "8", "--threads", "1", "--checkpoint-every", "2"]
OPTIONS += ["--evaluate-every", "50000"]
NUM_STEPS = 40
SHORT = [*OPTIONS, "--steps", str(NUM_STEPS)]
ENDLESS = [*OPTIONS, "--steps", "50000"]  # the test ends it
REPLICAS = ["--dp", "2"]
STAGES = ["--stages", "2", "--microbatches", "2"]
TRAIN = [sys.executable, "-m", "vigpipe.train"]
TWO_NODES = ["srun", "-N2", "-n2", "--kill-on-bad-exit=1"]
ENV = {"CUDA_VISIBLE_DEVICES": ""}

# What a test ends takes longer for each step, so that it is not over before a busy machine has sent
# the signal; later starts of the same job go on at full speed.
SLOW = """
import os, runpy, time
from torch.optim.optimizer import register_optimizer_step_post_hook
if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < int(os.environ.get("SLOW_STARTS", "1")):
    register_optimizer_step_post_hook(lambda *_: time.sleep(0.3))
"""
RUN = """
runpy.run_module("vigpipe.train", run_name="__main__", alter_sys=True)
"""
SLOW_TRAIN = [sys.executable, "-c", SLOW + RUN]

# Stands for `python -m vigpipe.train ARGUMENTS`; rank 1 takes a second longer to leave.
NOTES = """
import atexit, sys
names = ("SLURM_PROCID", "SLURM_RESTART_COUNT", "VIGPIPE_TOKEN")
with open("starts", "a") as file:
    file.write(" ".join(os.environ.get(name, "0") for name in names) + "\\n")
if os.environ["SLURM_PROCID"] == "1":
    atexit.register(time.sleep, 1)
sys.argv = sys.argv[2:]
"""
PYTHON = SLOW + NOTES + RUN


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run that nothing happens to, on the micro-batches that STAGES and REPLICAS make."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert main(["train", *SHORT, "--microbatches", "2", "--out", str(folder)]) == 0
    return folder


@dataclass
class Job:
    """A job of slurm/train.sbatch."""

    command: Command
    number: str
    log: Path
    env: dict[str, str]

    def control(self, *words: str) -> str:
        done = subprocess.run(
            ["scontrol", *words], env=self.env, check=True, capture_output=True, text=True
        )
        return done.stdout

    def facts(self) -> dict[str, str]:
        text = self.control("show", "job", "--oneliner", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def tells(self, words: str) -> bool:
        return self.log.exists() and words in self.log.read_text()

    def completes(self, folder: Path) -> dict[str, str]:
        """Wait for the end of the run and of all its processes."""
        wait_until((folder / "summary.json").exists, "the run ends")
        wait_until(lambda: not self.command.processes(), "its processes end")
        self.command.wait(1)
        wait_until(lambda: self.facts()["JobState"] == "COMPLETED", "the job is completed")
        return self.facts()


@contextlib.contextmanager
def batch(
    slurm, tmp_path, options, arguments, start: str | None = PYTHON, slow_starts: int = 0
) -> Iterator[Job]:
    python = tmp_path / "python"
    if start is not None:
        (tmp_path / "start.py").write_text(start)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/start.py "$@"\n')
    python.chmod(0o755)
    write_small_digits(tmp_path)
    log = tmp_path / "job.log"
    env = {**slurm, **ENV, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env["SLOW_STARTS"] = str(slow_starts)
    line = ["sbatch", "--parsable", "--ntasks-per-node=1", "--cpus-per-task=1"]
    line += [f"--output={log}", f"--chdir={tmp_path}", *options]
    with start_command([*line, str(ROOT / "slurm" / "train.sbatch"), *arguments], env) as command:
        # The job has what marks the processes of a command, too.
        assert command.popen.wait(GUARD) == 0, (command.folder / "stderr").read_text()
        number = (command.folder / "stdout").read_text().strip()
        job = Job(command, number, log, {**os.environ, **env})
        try:
            yield job
        finally:
            print(log.read_text() if log.exists() else "the job has not begun")
            subprocess.run(["scancel", job.number], env=job.env, check=True)


def local(slurm, *words):
    """Run slurm/local.sh; its daemons would keep a pipe open."""
    subprocess.run(
        ["bash", str(LOCAL), *words],
        env={**os.environ, **slurm},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def own(stderr):
    """What was said, without srun's remarks."""
    remarks = ("srun: ", "slurmstepd")
    return [line for line in stderr.splitlines() if not line.startswith(remarks)]


# ---- the batch script -----------------------------------------------------------------------


def test_a_job_requeues_itself_at_a_signal_and_goes_on_after_every_requeue(
    slurm, tmp_path, unbroken
):
    # A rank that left later than the other had its code hidden: srun ended it with SIGTERM, told
    # 143 instead of 75, and the job was not requeued.
    with batch(slurm, tmp_path, [], [*SHORT, *STAGES], slow_starts=2) as job:
        folder = tmp_path / "runs" / job.number
        wait_until(lambda: at_step(folder, 3), "step 3")
        began = time.monotonic()
        subprocess.run(["scancel", "--signal=USR1", job.number], env=job.env, check=True)
        wait_until(lambda: job.tells("is requeued"), "it is requeued")
        print(f"FIGURE SIGUSR1: saved and requeued after {time.monotonic() - began:.2f} s")
        first = max(losses(folder))
        assert list_checkpoints(folder)[0].name == f"step-{first:08d}"
        wait_until(lambda: at_step(folder, first + 3), "three steps more")
        print(f"FIGURE SIGUSR1: went on after {time.monotonic() - began:.2f} s")

        # The way of a preemption: SIGTERM to ranks and shell, then SIGKILL.
        began = time.monotonic()
        job.control("requeue", job.number)
        wait_until(lambda: job.tells("got SIGTERM"), "it saves")
        print(f"FIGURE requeue: saved after {time.monotonic() - began:.2f} s")
        second = max(losses(folder))
        facts = job.completes(folder)
        print(f"FIGURE requeue: completed after {time.monotonic() - began:.2f} s")
    assert (facts["Restarts"], facts["ExitCode"]) == ("2", "0:0")
    told = job.log.read_text()
    assert told.count("is requeued") == 1  # the other time Slurm did it
    assert f"exit code 75: job {job.number} is requeued" in told
    for saved in (first, second):
        assert f"stopped after step {saved} of {NUM_STEPS} (process " in told
        assert f"going on after step {saved}, from " in told
    is_the_same(folder, unbroken)

    starts = [line.split() for line in (tmp_path / "starts").read_text().splitlines()]
    assert sorted(start[:2] for start in starts) == [[r, c] for r in "01" for c in "012"]
    tokens = {(count, token) for _, count, token in starts}
    assert len(tokens) == 3  # one secret for all ranks of a start
    assert all(len(token) == 64 and token not in told for _, token in tokens)


def test_a_time_limit_that_is_near_does_the_same(slurm, tmp_path, unbroken):
    folder = tmp_path / "run"
    # Of three minutes it may use a few seconds. The script's own signal would come before.
    # How ranks agree to stop, the test before shows.
    options = ["-N1", "--time=3", "--signal=USR1@1"]
    arguments = [*SHORT, "--microbatches=2", "--stop-before=175s", f"--out={folder}"]
    with batch(slurm, tmp_path, options, arguments, slow_starts=1) as job:
        wait_until(lambda: job.tells("is requeued"), "it is requeued")
        saved = max(losses(folder))
        assert saved < NUM_STEPS
        job.control("update", f"JobId={job.number}", "TimeLimit=10")
        facts = job.completes(folder)
    assert (facts["Restarts"], facts["ExitCode"]) == ("1", "0:0")
    assert job.tells(f"stopped after step {saved} of {NUM_STEPS} (the time limit is near)")
    is_the_same(folder, unbroken)


def test_a_cancelled_job_saves_and_stays_so(slurm, tmp_path):
    folder = tmp_path / "run"
    with batch(slurm, tmp_path, [], [*ENDLESS, *REPLICAS, "--out", str(folder)]) as job:
        wait_until(lambda: at_step(folder, 3), "step 3")
        began = time.monotonic()
        subprocess.run(["scancel", job.number], env=job.env, check=True)
        job.command.wait(1)
        print(f"FIGURE scancel: all ended after {time.monotonic() - began:.2f} s")
        wait_until(lambda: job.facts()["JobState"] == "CANCELLED", "it is cancelled")
    assert not job.tells("is requeued")
    assert list_checkpoints(folder)[0].name == f"step-{max(losses(folder)):08d}"


@pytest.mark.parametrize(
    ("code", "kind", "requeued"),
    [(2, None, False), (76, None, False), (70, None, True), (70, "own", False), (143, None, True)],
)
def test_only_what_another_start_can_help_is_requeued(slurm, tmp_path, code, kind, requeued):
    """A program that only ends stands for the ranks."""
    record = tmp_path / "a folder $(false)" / "failed-rank0.json"
    record.parent.mkdir()
    text = json.dumps({"job": "slurm-JOB.0.0.token", "kind": kind}, indent=1)
    fails = f"echo '{text}' | sed \"s/JOB/$SLURM_JOB_ID/\" > '{record}'" if kind else ""
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$@"\n{fails}\nexit {code}\n')
    arguments = ["--out", "a folder $(false)", "--lr=0.1 * 2"]
    with batch(slurm, tmp_path, ["-N1"], arguments, start=None) as job:
        wait_until(lambda: job.tells("vigpipe.train"), "it starts")
        wait_until(lambda: job.facts()["JobState"] in ("FAILED", "PENDING"), "it ends")
        facts = job.facts()
        if requeued:  # a word of the shell, which outlives the job's state
            wait_until(lambda: job.tells("is requeued"), "it says so")
    assert facts["Restarts"] == ("1" if requeued else "0")
    assert job.tells("is requeued") == requeued
    line = "-m vigpipe.train --lr=0.1 * 2 --out a folder $(false) --resume auto"
    assert line in job.log.read_text().splitlines()
    if not requeued:
        assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", f"{code}:0")


# ---- ranks of an srun -----------------------------------------------------------------------


def test_a_second_step_on_the_same_port_stays_out_and_disturbs_nothing(slurm, tmp_path):
    port = str(free_ports(1))
    env = {**slurm, **ENV, "MASTER_PORT": port}
    line = [*SLOW_TRAIN, *ENDLESS, *REPLICAS, "--out"]  # the first leaves the cores to the second
    step = ["srun", "-N2", "-n2"]
    folder = tmp_path / "first"
    with start_command([*step, *line, str(folder)], env) as first:
        wait_until(lambda: at_step(folder, 2), "step 2")
        done = run_command([*step, *line, str(tmp_path / "second")], env)
        assert done.returncode == 2
        # A rank 1 that rank 0 is late for, on a busy machine, says what it has found itself.
        told = own(done.stderr)
        by_rank_1 = [text for text in told if " found another run " in text]
        (by_rank_0,) = [text for text in told if text not in by_rank_1]
        assert by_rank_0.startswith(f"vigpipe: rank 0 cannot listen on port {port} of ")
        assert len(by_rank_1) <= 1
        for task in (0, 1):
            assert f"task {task}: Exited with exit code 2" in done.stderr
        steps = max(losses(folder))
        wait_until(lambda: max(losses(folder)) > steps, "the first goes on")
        assert first.popen.poll() is None
        assert not list(folder.glob("failed-rank*"))


def test_a_killed_srun_leaves_nothing_running(slurm, tmp_path):
    folder = tmp_path / "run"
    line = [*TWO_NODES, *TRAIN, *ENDLESS, *REPLICAS, "--out", str(folder)]
    with start_command(line, {**slurm, **ENV}) as running:
        wait_until(lambda: at_step(folder, 3), "step 3")
        began = time.monotonic()
        running.popen.send_signal(signal.SIGKILL)
        running.wait(1)  # fails if something is left
        print(f"FIGURE srun killed: all ended after {time.monotonic() - began:.2f} s")


# ---- nodes ----------------------------------------------------------------------------------


def peer_of(folder, began):
    """What rank 0 tells, and how long after `began` on the clock."""
    wait_until((folder / "failed-rank0.json").exists, "the peer notices")
    record = json.loads((folder / "failed-rank0.json").read_text())
    return record, record["time"] - began


def names_of(command):
    """The programs that its processes run."""
    names = set()
    for pid in command.processes():
        with contextlib.suppress(OSError):
            names.add(Path(f"/proc/{pid}/comm").read_text().strip())
    return names


def test_a_lost_node_is_noticed_and_the_run_goes_on_without_it(slurm, tmp_path, unbroken):
    folder = tmp_path / "run"
    arguments = [*SHORT, *REPLICAS, "--out", str(folder)]
    try:
        with start_command([*TWO_NODES, *SLOW_TRAIN, *arguments], {**slurm, **ENV}) as running:
            # So late that what is left is too short for a straggler, which a busy machine makes.
            wait_until(lambda: at_step(folder, NUM_STEPS - WARM_UP - WINDOW), "the last steps")
            began = time.time()
            local(slurm, "fail", "node2")
            record, seconds = peer_of(folder, began)
            # srun itself waits until Slurm has given the node up.
            wait_until(lambda: names_of(running) == {"srun"}, "only srun is left", PROMPT)
            print(
                f"FIGURE node lost: noticed after {seconds:.2f} s, "
                f"ranks ended after {time.time() - began:.2f}"
            )
            assert seconds < 5
            assert (record["kind"], record["code"]) == ("lost peer", 70)
            told = running.folder / "stderr"  # srun hands it on when it likes
            wait_until(lambda: "rank 0 lost a peer: " in told.read_text(), "rank 0 tells")
            assert max(losses(folder)) < NUM_STEPS
            one_node = ["srun", "-N1", "-n1", "-w", "node1", *TRAIN, *arguments]
            done = run_command([*one_node, "--elastic", "--resume", "auto"], {**slurm, **ENV})
            print(f"FIGURE node lost: completed on one node after {time.time() - began:.2f} s")
        assert (done.returncode, done.stderr) == (0, "")
        assert "\n2 micro-batches, on cpu; " in done.stdout
        assert "going on after step" in done.stdout
        is_the_same(folder, unbroken)
    finally:
        local(slurm, "start")


def test_a_frozen_node_is_noticed_at_the_timeout(slurm, tmp_path):
    folder = tmp_path / "run"
    line = [*TWO_NODES, *TRAIN, *ENDLESS, *REPLICAS, "--out", str(folder)]
    line += ["--timeout", "10"]  # no rank of a busy machine takes as long for its part of a step
    try:
        with start_command(line, {**slurm, **ENV}) as running:
            wait_until(lambda: at_step(folder, 3), "step 3", running=running)
            began = time.time()
            local(slurm, "freeze", "node2")
            record, seconds = peer_of(folder, began)
            told = running.folder / "stderr"
            wait_until(lambda: "task 0: Exited with" in told.read_text(), "rank 0 ends", PROMPT)
            print(
                f"FIGURE node frozen: noticed after {seconds:.2f} s with --timeout 10, "
                f"rank 0 ended after {time.time() - began:.2f}"
            )
            # The timeout counts from when the peer began to wait, perhaps before the rank froze.
            assert "Timed out waiting 10000ms" in record["message"]
            assert seconds < 30  # by default it would be 60
            assert (record["kind"], record["code"]) == ("lost peer", 70)
            assert "task 0: Exited with exit code 70" in told.read_text()
            local(slurm, "thaw", "node2")
            running.wait(20)  # nothing is left
    finally:
        local(slurm, "thaw", "node2")
        local(slurm, "start")
