"""Plant faults in the package, drawn by chance, and tell how many the tests find.

    .venv/bin/python -m tests.mutants --sample 100 --seed 1 --out .mutants

It takes what is committed. First it runs the tests once, and notes which run what: as long as the
tests take, twice for some. Then it plants one fault at a time in each of two copies, and runs the
tests that run the fault's line, cheapest first. Each fault gets new processes, and 300 seconds: a
test that fails or is stuck has found it; that time is up, or that no test runs the line, is a miss.
What is done is kept in the folder, and is not done again if the command is given again.
Tests marked heavy or slurm are left out, as are faults in texts and annotations.
"""

import argparse
import json
import os
import queue
import resource
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.faults import ROOMS, Fault, draw
from tests.mutants.lines import Ran, note_lines, numbered, read
from tests.mutants.planting import Verdict, plant

ROOT = Path(__file__).parents[2]
MARKS = "not heavy and not slurm"
COPIES = ("copy-0", "copy-1")
_MOST_BYTES = 12 << 30  # of a process's data: a fault may ask for any size


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sample", type=int, default=100, help="how many faults")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--out", type=Path, default=Path(".mutants"), help="folder of all it makes")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(exist_ok=True)
    if not (out / "shared").exists():
        (out / "shared").symlink_to(ROOT.parent / "shared")
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    for name in ("noted", *COPIES):
        _clone(out / name)
    tests = _what_tests_run(out)
    faults = draw(out / COPIES[0], options.sample, options.seed)
    verdicts = _plant_all(faults, tests, out)
    print(table(verdicts))


def _clone(path: Path) -> None:
    """Clone what is committed, unless that is done; what is kept is of one commit only."""
    if not path.exists():
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, path], check=True)
    commit, wanted = (
        subprocess.check_output(["git", "-C", where, "rev-parse", "HEAD"], text=True).strip()
        for where in (path, ROOT)
    )
    if commit != wanted:
        sys.exit(f"{path} has commit {commit[:8]}, not {wanted[:8]}; give another folder by --out")


def _what_tests_run(out: Path) -> list[Ran]:
    """What each test runs, from a run of all in a copy that notes its lines."""
    copy, folder = out / "noted", out / "lines"
    if not (folder / "done").exists():
        folder.mkdir()
        size = len(numbered(copy))
        note_lines(copy)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "-m", MARKS, "--durations=60"]
        command += ["-p", "tests.mutants.plugin", f"--rootdir={copy}", "-c", "pyproject.toml"]
        command += [f"--note-lines={folder}", f"--size={size}"]
        with (folder / "log").open("w") as log:
            variables = {**os.environ, "PYTHONPATH": str(copy)}
            subprocess.run(command, cwd=copy, env=variables, stdout=log, stderr=log, check=False)
        (folder / "done").touch()
    ran = list(read(sorted(folder.glob("ran-*.jsonl"))))
    if failed := [one.test for one in ran if not one.passed]:
        print(f"{len(failed)} tests that did not pass find nothing:", *failed, sep="\n    ")
    return [one for one in ran if one.passed]


def _plant_all(faults: list[Fault], tests: list[Ran], out: Path) -> list[Verdict]:
    copies: queue.Queue[Path] = queue.Queue()
    for name in COPIES:
        copies.put(out / name)
    numbers, path = numbered(out / COPIES[0]), out / "verdicts.jsonl"
    path.touch()
    known = {one.fault: one for one in (Verdict(**json.loads(x)) for x in path.open())}

    def judge(fault: Fault) -> Verdict:
        if str(fault) in known:
            return known[str(fault)]
        copy = copies.get()
        try:
            number = numbers[fault.file, fault.statement]
            verdict = plant(fault, [one for one in tests if one.hits[number]], copy)
        finally:
            copies.put(copy)
        with path.open("a") as verdicts:
            print(verdict.line(), file=verdicts)
        print(f"{'found' if verdict.found else 'MISSED'} {fault} ({verdict.how})", flush=True)
        return verdict

    with ThreadPoolExecutor(len(COPIES)) as pool:
        return list(pool.map(judge, faults))


def table(verdicts: list[Verdict]) -> str:
    """How many faults were found, by room, and those that were not, in Markdown."""
    rooms: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        rooms[verdict.room].append(verdict)
    lines = ["| room | faults | found |", "|---|---|---|"]
    for room in (room for room in ROOMS if room in rooms):
        lines.append(f"| {room} | {len(rooms[room])} | {sum(v.found for v in rooms[room])} |")
    lines.append(f"| all | {len(verdicts)} | {sum(verdict.found for verdict in verdicts)} |")
    missed = [f"- {v.fault} ({v.how})" for v in verdicts if not v.found]
    return "\n".join([*lines, "", f"{len(missed)} were not found:", "", *missed])


if __name__ == "__main__":
    main()
