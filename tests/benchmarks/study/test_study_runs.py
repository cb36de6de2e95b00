"""The study: what it refuses, what it starts, and one small experiment from end to end."""

import csv
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.study.check import Machine, check_numbers, check_with_torch, find_machine
from benchmarks.study.configs import parse_configs
from benchmarks.study.options import StudyConfig
from benchmarks.study.runs import command_line, run_options, run_study
from tests.refusals import check_refusals
from tests.test_cli import make_pictures
from tests.world import ROOT, run_command
from vigpipe.errors import InputError
from vigpipe.parallel.layout import Layout


@pytest.fixture
def small(tmp_path):
    """An experiment on 8 training and 6 test images."""
    return StudyConfig(
        images=8,
        batch=2,
        data=str(make_pictures(tmp_path / "pictures", 4, 3, (4, 4))),
        configs="2x2",
        rounds=1,
        warmup=1,
        test_batches=3,
        out=tmp_path / "results",
        keep_runs=tmp_path / "runs",
    )


# ---- refused ---------------------------------------------------------------------------------


def test_numbers_that_do_not_go_together_are_refused(small):
    rows = [
        ({"rounds": 0}, "--rounds 0: must be at least 1"),
        ({"warmup": -1}, "--warmup -1: must be at least 0"),
        ({"images": 7}, "--images 7: must be a whole number of batches of 2; choose 6"),
        ({"images": 2}, "--images 2: makes 1 steps of --batch 2, .* choose at least 4"),
        ({"test_batches": 1}, "--test-batches 1: the first 1 .* choose at least 2"),
        ({"configs": "2x2x2"}, "--configs 2x2x2: cuts a batch into 4 micro-batches, .* has 2"),
    ]
    rows = [(replace(small, **options), words) for options, words in rows]
    check_refusals(rows, lambda config: check_numbers(config, parse_configs(config.configs)))


def test_images_and_model_are_looked_at_before_the_first_run(small):
    rows = [
        ({"data": "nowhere"}, "nowhere: no such data"),
        ({"images": 10}, "--images 10: needs 10 images, but .* has 8 of them"),
        ({"test_batches": 4}, "--test-batches 4: needs 8 images, but .* has 6 of them"),
        ({"configs": "9x2"}, "--configs 9x2: 9 stages for the 8 blocks"),
        ({"profile": Path("nowhere.json")}, "--profile nowhere.json: cannot be read"),
    ]
    rows = [(replace(small, **options), words) for options, words in rows]
    check_refusals(rows, lambda config: check_with_torch(config, parse_configs(config.configs)))
    assert check_with_torch(small, parse_configs(small.configs)) == (small.data, 8)


def test_results_are_not_overwritten(small, monkeypatch):
    monkeypatch.setattr("benchmarks.study.runs.check_with_torch", _fine)
    small.out.mkdir()
    (small.out / "rows.csv").touch()
    with pytest.raises(InputError, match=r"holds rows\.csv already"):
        run_study(small, [])


# ---- where ------------------------------------------------------------------------------------


@pytest.fixture
def no_slurm(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_the_ranks_are_on_this_host_or_steps_of_a_batch_script(small, no_slurm):
    assert find_machine(small) == Machine(False, len(os.sched_getaffinity(0)))
    with pytest.raises(InputError, match="--launcher srun: this is not a batch script"):
        find_machine(replace(small, launcher="srun"))
    no_slurm.setenv("SLURM_JOB_ID", "7")
    no_slurm.setenv("SLURM_JOB_CPUS_PER_NODE", "4(x2),2")
    assert find_machine(small) == Machine(True, 10)
    assert find_machine(replace(small, launcher="local")).has_slurm is False
    no_slurm.setenv("SLURM_STEP_ID", "0")  # in a step it starts the ranks itself
    assert find_machine(small).has_slurm is False


def test_it_is_no_rank_itself(small, no_slurm):
    rank = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    for name, value in {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        no_slurm.setenv(name, str(value))
    with pytest.raises(InputError, match="call it once"):
        find_machine(small)


def test_srun_has_a_task_for_every_rank_and_cores_for_its_threads(small):
    config = replace(small, threads=3)
    options = run_options(config, Layout(2, 5, 2))
    words = command_line(config, Layout(2, 5, 2), Machine(True, 12), "time", options)
    assert words[:7] == ["srun", "--ntasks=4", "--cpus-per-task=3", "--kill-on-bad-exit=1",
                         sys.executable, "-m", "vigpipe"]  # fmt: skip
    pairs = dict(zip(words[8::2], words[9::2], strict=True))
    wanted = {"--stages": "2", "--microbatches": "5", "--dp": "2", "--threads": "3", "--steps": "4"}
    assert wanted.items() <= pairs.items()
    local = command_line(config, Layout(2, 5, 2), Machine(False, 12), "time", options)
    assert local == words[4:]


def test_this_process_stays_small():
    # Symptom: the peak of a run on one stage was that of the process that started it. Linux counts
    # what a process held before exec.
    code = (
        "import sys, benchmarks.study.runs; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert run_command([sys.executable, "-c", code], fresh=True).returncode == 0


# ---- the runs ---------------------------------------------------------------------------------


def test_a_run_that_fails_ends_the_experiment_with_its_code(small, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.study.runs.check_with_torch", _fine)
    monkeypatch.setattr("benchmarks.study.runs.run_child", lambda words: 76)
    assert run_study(small, []) == 76
    assert "ended with exit code 76" in capsys.readouterr().out
    assert list(small.keep_runs.iterdir()) == []
    assert not (small.out / "rows.csv").exists()


def _fine(config, layouts):
    return "pictures", 8


@pytest.mark.heavy
@pytest.mark.multiprocess
def test_a_small_experiment_from_end_to_end(small, capsys, monkeypatch):
    with pytest.raises(InputError, match="no such data"):  # found in another process
        run_study(replace(small, data="nowhere"), [])
    options = ["--images", "8", "--batch", "2", "--configs", "2x2", "--rounds", "1"]
    options += ["--warmup", "1", "--test-batches", "3", "--data", small.data]
    options += ["--out", str(small.out), "--keep-runs", str(small.keep_runs)]
    done = run_command([sys.executable, "-m", "benchmarks", "study", *options])
    assert (done.returncode, done.stderr) == (0, "")
    assert "round 1 of 1, 2x2: " in done.stdout
    assert {path.name for path in small.out.iterdir()} == {
        "README.md", "loss.png", "profile.json", "rows.csv"}  # fmt: skip
    page = (small.out / "README.md").read_text(encoding="utf-8")
    assert "`python -m benchmarks study --images 8 --batch 2 " in page
    assert "| 2x2 " in page
    rows = list(csv.DictReader((small.out / "rows.csv").read_text().splitlines()))
    steps = [row for row in rows if row["config"] == "2x2" and row["phase"] == "train"]
    assert [row["step"] for row in steps] == ["1", "2", "3", "4"]
    assert [bool(row["step_seconds"]) for row in steps] == [False, True, False, True]
    assert {path.name for path in small.keep_runs.iterdir()} == {"profile.json", "round-1-2x2"}

    # What was kept is not done again, but made a page of; other options are refused.
    monkeypatch.setattr("benchmarks.study.runs.check_with_torch", _fine)
    shutil.rmtree(small.out)
    assert run_study(small, ["study"]) == 0
    assert capsys.readouterr().out.count(": kept") == 1
    assert (small.out / "rows.csv").read_text().splitlines()[1:]
    shutil.rmtree(small.out)
    for options, expected in (
        ({"seed": 1}, "round-1-2x2 was run with seed = 0, but now it is 1"),
        ({"test_batches": 2}, "round-1-2x2 was run with test_batches = 3, but now it is 2"),
    ):
        with pytest.raises(InputError, match=expected):
            run_study(replace(small, **options), [])
    (small.keep_runs / "round-1-2x2" / "summary.json").unlink()
    with pytest.raises(InputError, match="round-1-2x2: holds no finished run"):
        run_study(small, [])


def test_the_batch_script_passes_on_what_it_is_given(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "2"}
    script = ["bash", str(ROOT / "benchmarks" / "study.sbatch")]
    done = run_command([*script, "--batch=10", "--images", "40", "--seed", "1"], env)
    assert done.returncode == 0
    assert done.stdout == (
        "-m benchmarks study --test-batches 10 --rounds 1 --threads 2 --keep-runs runs/study "
        "--batch=10 --images 40 --seed 1\n"
    )
    assert "--images 50000 --batch 1000" in run_command(script, env).stdout
