"""benchmarks/study.sbatch, small, on the pretend nodes of slurm/local.sh."""

import os
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from tests.planning.profiles import make_profile
from tests.test_cli import make_pictures
from tests.world import ROOT, run_command, wait_until
from vigpipe.config.options import TrainConfig
from vigpipe.planning.profile import write_profile
from vigpipe.profiling.measure import cost_options
from vigpipe.run.facts import prepare

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]


def test_every_run_is_a_step_of_the_job(slurm, tmp_path):
    data = str(make_pictures(tmp_path / "pictures", train=4, test=3, size=(4, 4)))
    job = prepare(TrainConfig(model="vig_study", data=data, batch_size=2), torch.float32)
    profile = make_profile([1e-3] * 8)
    profile = replace(profile, model="vig_study", options=cost_options(job))
    write_profile(profile, tmp_path / "profile.json")
    steps, log, out = tmp_path / "steps", tmp_path / "job.log", tmp_path / "results"
    for name, body in (
        ("python", f'exec {sys.executable} "$@"'),
        ("srun", f'echo "$@" >> {steps}; exec {shutil.which("srun")} "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    options = ["--images", "8", "--batch", "2", "--configs", "2x2", "--warmup", "1"]
    options += ["--test-batches", "3", "--data", data, "--profile", str(tmp_path / "profile.json")]
    options += ["--out", str(out), "--keep-runs", str(tmp_path / "runs")]
    batch = ["sbatch", f"--output={log}", str(ROOT / "benchmarks" / "study.sbatch")]
    env = {**slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert run_command([*batch, *options], env).returncode == 0
    # sbatch --wait looks at long intervals; the folder is the last that the command prints.
    wait_until(lambda: log.exists() and log.read_text().endswith(f"{out}\n"), "it has ended")
    (step,) = steps.read_text().splitlines()
    assert step.startswith("--ntasks=2 --cpus-per-task=1 --kill-on-bad-exit=1 ")
    page = (out / "README.md").read_text(encoding="utf-8")
    assert ", 4 cores\n" in page  # those of the job
    assert "| 2x2 " in page
