"""What does a lost replica cost in accuracy? Runs with a fault at random, beside runs without.

    python -m tests.faults.accuracy --runs 20 --out DIR

For each strategy that outlives a replica and each seed there are two runs of the same command, on
the digits, with three replicas of one stage or two. In one of them a rank is killed or frozen,
whenever and wherever that is. Tests of what such runs leave are in test_deaths.py.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from tabulate import tabulate

from tests.faults.test_deaths import events, random_fault
from tests.faults.test_faults import FAULTY
from tests.world import ROOT
from vigpipe.run.provenance import format_versions

OPTIONS = ["--data", "digits", "--epochs", "4", "--batch-size", "48", "--lr", "0.004"]
OPTIONS += ["--evaluate-every", "100", "--threads", "1", "--dp", "3", "--timeout", "5"]
STRATEGIES = {
    "gossip": ["--strategy", "gossip", "--items", "pool", "--average-every", "5"],
    "server": ["--strategy", "server", "--items", "pool"],
}
NEVER = "step:1000000:0:kill"


class Ended(NamedTuple):
    """A run that has ended."""

    strategy: str
    seed: int
    size: int
    fault: str
    top1: float
    lost: int


def run(strategy: str, seed: int, size: int, fault: str, folder: Path) -> Ended:
    """Train, and read what the run says of itself."""
    ranks = f"3x{size}" + (f"+{size}" if strategy == "server" else "")
    command = ["train", *OPTIONS, *STRATEGIES[strategy], "--stages", str(size)]
    command += ["--microbatches", str(size), "--seed", str(seed), "--out", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    env["FAULT_DONE"] = str(folder.with_name(f"{folder.name}.done"))
    subprocess.run(
        [sys.executable, FAULTY, fault, ranks, *command],
        env=env,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    summary = json.loads((folder / "summary.json").read_text())
    lost = summary["replicas"].get("lost", [])
    items = {e["item"] for e in events(folder) if "item" in e and "did" not in e}
    assert items == set(range(3 * summary["steps"])), folder
    ended = Ended(strategy, seed, size, fault, summary["test"]["top1"], len(lost))
    print(*ended, flush=True)
    return ended


def row(strategy: str, whole: list[Ended], disturbed: list[Ended]) -> list[str]:
    """Compare the runs of a strategy."""
    lost = [ended for ended in disturbed if ended.lost]
    a, b = [e.top1 for e in whole], [e.top1 for e in lost]
    cells = [strategy, f"{len(whole)}", f"{fmean(a):.2%} ± {stdev(a):.2%}"]
    cells += [f"{min(a):.2%} – {max(a):.2%}", f"{len(lost)}", f"{fmean(b):.2%} ± {stdev(b):.2%}"]
    return [*cells, f"{min(b):.2%} – {max(b):.2%}", f"{100 * (min(b) - min(a)):+.2f}"]


def main() -> None:
    """Run all, and write README.md and rows.csv."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    rows: list[Ended] = []
    for seed in range(given.runs):
        for strategy in STRATEGIES:
            size, fault = random_fault(seed, {1: 3, 2: 3}, 100, ["kill", "kill", "freeze"])
            for what, name in ((NEVER, "whole"), (fault, "disturbed")):
                folder = given.out / "runs" / f"{strategy}-{seed}-{name}"
                folder.parent.mkdir(exist_ok=True)
                rows.append(run(strategy, seed, size, what, folder))
    headers = ["", "runs", "top-1", "min – max", "runs that lost one", "top-1", "min – max"]
    headers += ["least against least, points"]
    table = tabulate(
        [
            row(
                strategy,
                [e for e in rows if e.strategy == strategy and e.fault == NEVER],
                [e for e in rows if e.strategy == strategy and e.fault != NEVER],
            )
            for strategy in STRATEGIES
        ],
        headers=headers,
        tablefmt="github",
        disable_numparse=True,
    )
    one = json.loads(next(given.out.glob("runs/*/summary.json")).read_text())
    (given.out / "README.md").write_text(
        "# What a lost replica costs\n\nvig_digits on the digits, 3 replicas of one stage or two, "
        "4 epochs, 360 test images. Every run has ended with exit code 0 and with all its items "
        f"done. The faults are in rows.csv.\n\n{table}\n\n"
        f"- command: `python -m tests.faults.accuracy --runs {given.runs} --out {given.out}`\n"
        f"- commit: {one['commit']}\n- hardware: {one['hardware']}\n"
        f"- versions: {format_versions(one['versions'])}\n",
        encoding="utf-8",
    )
    lines = [",".join(Ended._fields), *(",".join(map(str, ended)) for ended in rows)]
    (given.out / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
