"""The ranks of a real srun, on the pretend nodes of slurm/local.sh."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.small_digits import SMALL_DIGITS
from tests.world import ROOT, run_command, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]

SCRIPT = """
import dataclasses, json, os, sys
from pathlib import Path
from vigpipe.launch import environment, failures

def work(me, mode, folder):
    if mode == "early":
        environment.threads_per_rank(0, me, os.environ)
    facts = {**dataclasses.asdict(me), "node": os.environ["SLURMD_NODENAME"],
             "threads": environment.threads_per_rank(None, me, os.environ)}
    if mode != "facts":
        facts["total"] = meet(me, mode)
    (folder / f"rank-{me.rank}.json").write_text(json.dumps(facts))
    return 0

def meet(me, mode):
    import torch, torch.distributed as dist
    from vigpipe.launch import rendezvous
    rendezvous.init_process_group(me, "gloo", 60)
    total = torch.tensor([float(me.rank)])
    dist.all_reduce(total)
    if mode == "error" and me.rank == 1:
        raise RuntimeError("rank 1 broke")
    dist.all_reduce(total.clone())
    return total.item()

me = environment.from_environment(os.environ)
folder = Path(sys.argv[2])
sys.exit(failures.run_rank(lambda: work(me, sys.argv[1], folder), me, [folder / "out"]))
"""


def srun(
    slurm: dict[str, str], folder: Path, options: Sequence[str], mode: str
) -> "subprocess.CompletedProcess[str]":
    script = folder / "script.py"
    script.write_text(SCRIPT)
    line = ["srun", *options, sys.executable, str(script), mode, str(folder)]
    return run_command(line, slurm)


def read_ranks(folder: Path, num_ranks: int = 4) -> list[dict]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


def test_two_nodes_of_two_tasks(slurm, tmp_path):
    done = srun(slurm, tmp_path, ["-N2", "-n4", "--ntasks-per-node=2"], "facts")
    assert (done.returncode, done.stderr) == (0, "")
    ranks = read_ranks(tmp_path)
    assert [(r["rank"], r["local_rank"]) for r in ranks] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [r["node"] for r in ranks] == ["node1", "node1", "node2", "node2"]
    assert {r["launcher"] for r in ranks} == {"srun"}
    assert {r["local_world_size"] for r in ranks} == {2}
    assert len({r["run_id"] for r in ranks}) == 1


def test_three_tasks_and_one(slurm, tmp_path):
    options = ["-N2", "-n4", "--distribution=arbitrary", "-w", "node1,node1,node1,node2"]
    done = srun(slurm, tmp_path, options, "facts")
    assert (done.returncode, done.stderr) == (0, "")
    ranks = read_ranks(tmp_path)
    assert [r["local_world_size"] for r in ranks] == [3, 3, 3, 1]
    assert [r["local_rank"] for r in ranks] == [0, 1, 2, 0]


def test_one_node_needs_no_settings_and_follows_cpus_per_task(slurm, tmp_path):
    own = {name: slurm[name] for name in slurm if name not in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")}
    done = srun(own, tmp_path, ["-N1", "-n2", "--cpus-per-task=2"], "ok")
    assert (done.returncode, done.stderr) == (0, "")
    ranks = read_ranks(tmp_path, 2)
    assert {r["total"] for r in ranks} == {1.0}
    assert {r["init_method"].rpartition(":")[0] for r in ranks} == {"tcp://127.0.0.1"}
    assert {r["threads"] for r in ranks} == {2}


def test_python_in_a_one_task_step_is_alone(slurm, tmp_path):
    code = "import os; from vigpipe.launch import environment; "
    code += "print(environment.from_environment(os.environ).launcher)"
    done = run_command(["srun", "-n1", sys.executable, "-c", code], slurm)
    assert (done.stdout, done.stderr) == ("alone\n", "")


def test_one_failing_rank_ends_all_and_is_told_once(slurm, tmp_path):
    options = ["-N2", "-n2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    done = srun(slurm, tmp_path, options, "error")
    assert done.returncode != 0
    assert done.stderr.count("rank 1: RuntimeError: rank 1 broke") == 1
    assert "lost a peer" not in done.stderr
    record = json.loads((tmp_path / "out" / "failed-rank1.json").read_text())
    assert (record["kind"], record["code"]) == ("own", 1)


def test_the_batch_script_starts_four_ranks(slurm, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    # Stands for `python -m vigpipe.train ARGUMENTS`.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/script.py facts "$4"\n')
    python.chmod(0o755)
    log = tmp_path / "job.log"
    env = {**slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    batch = ["sbatch", "--parsable", f"--output={log}", str(ROOT / "slurm" / "train.sbatch")]
    job = run_command([*batch, "--output", str(tmp_path)], env).stdout.strip()
    listed = ["squeue", "--noheader", f"--jobs={job}", "--states=PD,R,CG", "--format=%T"]
    # sbatch --wait looks at long intervals.
    wait_until(lambda: not run_command(listed, env).stdout.strip(), "the job has ended")
    started, ended = log.read_text().splitlines()
    assert f": job {job}, start 1, on " in started
    assert ended.endswith(": exit code 0")
    ranks = read_ranks(tmp_path)
    assert {r["launcher"] for r in ranks} == {"srun"}
    assert {r["threads"] for r in ranks} == {4}  # --cpus-per-task


def test_a_mistake_of_all_ranks_is_told_once(slurm, tmp_path):
    done = srun(slurm, tmp_path, ["-N2", "-n4", "--ntasks-per-node=2"], "early")
    assert done.returncode == 2
    assert done.stderr.count("--threads 0: expected a whole number") == 1


def test_node_names_that_do_not_resolve_ask_for_master_addr(slurm, tmp_path):
    own = {name: slurm[name] for name in slurm if name != "MASTER_ADDR"}
    done = srun(own, tmp_path, ["-N2", "-n2"], "ok")
    assert done.returncode == 2
    assert done.stderr.count("set MASTER_ADDR") == 1


TRAIN = ["-m", "vigpipe.train", "--stages", "2", "--microbatches", "5"]
SHORT = [*SMALL_DIGITS, "--steps", "3", "--batch-size", "40", "--threads", "1"]
TWO_NODES = ["srun", "-N2", "-n2"]


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_training_under_srun_has_the_losses_of_plain_python(slurm, tmp_path):
    line = [sys.executable, *TRAIN, *SHORT, "--out"]
    done = run_command([*TWO_NODES, *line, str(tmp_path / "srun")], slurm)
    assert (done.returncode, done.stderr) == (0, "")
    done = run_command([*line, str(tmp_path / "python")])
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(tmp_path / "srun") == losses(tmp_path / "python")
    assert len(losses(tmp_path / "srun")) == 4  # three steps and the evaluation
