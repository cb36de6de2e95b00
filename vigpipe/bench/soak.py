"""A long run to which something happens again and again: does it end as if nothing had?

Two runs of the same command line: one that is left alone, and one whose ranks are killed, frozen
and asked to stop at steps that a seed chooses. What is told of them:

    weights    the largest difference between the two at the end
    memory     of the ranks of the run that is left alone, and their open files: must not grow
    goodput    the steps' own seconds in the run that is left alone / wall time of the run that is
               not, from its first start to its last end, restarts, checkpoints and steps done
               twice included
"""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors.torch import load_file
from tabulate import tabulate

from vigpipe.bench.options import SoakBench
from vigpipe.errors import DONE, INTERRUPTED, SAVED, InputError
from vigpipe.launch.child import Stopped, stoppable
from vigpipe.run.folder import make_output_folder
from vigpipe.run.provenance import origin

Kind = Literal["kill", "freeze", "stop"]
POLL_SECONDS = 0.05
SETTLED = 0.1  # share of the steps after which memory must not grow
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "stop": signal.SIGTERM}


class Fault(NamedTuple):
    """What is to happen, and when.

    Attributes:
        step: when this many steps are done.
        kind: SIGKILL or SIGSTOP to a rank, or SIGTERM to the launcher.
        rank: which one; -1 for the launcher.
    """

    step: int
    kind: Kind
    rank: int


@dataclass
class Happened:
    """What a fault cost.

    Attributes:
        step: steps done when it happened.
        kind: see Fault.
        rank: see Fault.
        began: when, by time.perf_counter.
        lost_steps: that were done again.
        seconds: from the fault to the first step beyond those that were done.
    """

    step: int
    kind: Kind
    rank: int
    began: float
    lost_steps: int = 0
    seconds: float = 0.0


class Sample(NamedTuple):
    """One rank's memory at a step."""

    step: int
    rank: int
    resident_bytes: int
    open_files: int


@dataclass(frozen=True)
class Ended:
    """A run from its first start to its last end."""

    folder: Path
    wall_seconds: float
    faults: list[Happened]
    samples: list[Sample]


def bench_soak(options: SoakBench) -> None:
    """Run both and write README.md, faults.csv and memory.csv; a signal ends what runs, too."""
    try:
        with stoppable():
            _soak(options)
    except Stopped:
        sys.exit(INTERRUPTED)


def _soak(options: SoakBench) -> None:
    folder = make_output_folder(options.out)
    left_alone = options.unbroken or folder / "unbroken"
    if not (left_alone / "summary.json").exists():
        write_samples(left_alone / "memory.csv", run(left_alone, options, []).samples)
    faults = choose_faults(options)
    if not faults:
        return
    broken = run(folder / "run", options, faults)
    with (folder / "faults.csv").open("w", newline="", encoding="utf-8") as file:
        columns = [field.name for field in fields(Happened) if field.name != "began"]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(asdict(fault) for fault in broken.faults)
    samples = read_samples(left_alone / "memory.csv")
    write_samples(folder / "memory.csv", samples)
    text = report(options, left_alone, broken, samples)
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(text)


def choose_faults(options: SoakBench) -> list[Fault]:
    """About every `faults_every` steps, in random order of kinds and ranks."""
    generator = random.Random(options.seed)
    found: list[Fault] = []
    step = 0.0
    while options.faults_every:
        step += generator.uniform(0.5, 1.5) * options.faults_every
        if step >= options.steps:
            break
        kind = generator.choice(get_args(Kind))
        rank = generator.randrange(options.stages * options.dp)
        found.append(Fault(int(step), kind, -1 if kind == "stop" else rank))
    return found


def command_of(folder: Path, options: SoakBench) -> list[str]:
    """The run's command line, the same for every start of it."""
    words: dict[str, Any] = {
        "--model": options.model,
        "--data": options.data,
        "--stages": options.stages,
        "--dp": options.dp,
        "--microbatches": options.microbatches,
        "--batch-size": options.batch_size,
        "--steps": options.steps,
        "--epochs": options.steps,  # more than enough
        "--evaluate-every": options.steps,
        "--checkpoint-every": options.checkpoint_every,
        "--timeout": options.timeout,
        "--threads": 1,
        "--max-restarts": options.steps,
        "--resume": "auto",
        "--out": folder,
    }
    given = [str(word) for pair in words.items() for word in pair]
    return [sys.executable, "-m", "vigpipe", "train", *given]


def run(folder: Path, options: SoakBench, faults: Sequence[Fault]) -> Ended:
    """Start a run, let the faults happen, and start it again whenever it asks for that."""
    happened: list[Happened] = []
    samples: list[Sample] = []
    coming = list(faults)
    began = time.perf_counter()
    code = DONE
    with tempfile.TemporaryDirectory(prefix="vigpipe-soak-") as name:
        place = Path(name)
        for _ in range(len(faults) + 1):
            with _started(command_of(folder, options), place) as child:
                while child.poll() is None:
                    step = last_step(folder)
                    _account(happened, step)
                    if samples[-1:] == [] or step >= samples[-1].step + options.checkpoint_every:
                        samples += _sample(place, step)
                    if coming and step >= coming[0].step and _happen(coming[0], place, child):
                        fault = coming.pop(0)
                        happened.append(Happened(step, fault.kind, fault.rank, time.perf_counter()))
                    time.sleep(POLL_SECONDS)
            code = child.returncode
            if code == DONE:
                _account(happened, options.steps + 1)
                return Ended(folder, time.perf_counter() - began, happened, samples)
            if code != SAVED:
                break
            happened[-1].step = last_step(folder)  # it went on to the end of its step
            happened[-1].seconds = 0.0
    raise InputError(f"{folder}: the run ended with exit code {code}, for the reason above")


@contextlib.contextmanager
def _started(command: list[str], place: Path) -> "Iterator[subprocess.Popen[bytes]]":
    child = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(place)},  # where ranks leave their process ids
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        child.wait()


def last_step(folder: Path) -> int:
    """The last step in metrics.jsonl; 0 before there is one."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2000))
            lines = file.read().splitlines()[1 if size > 2000 else 0 :]
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if "step" in row and "event" not in row:
                return row["step"]
    return 0


def _pids(place: Path) -> dict[int, int]:
    """Process ids of the ranks there are, by rank."""
    found: dict[int, int] = {}
    for path in sorted(place.glob("vigpipe-*/rank*.pid"), key=lambda path: path.stat().st_mtime):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.stem.removeprefix("rank"))] = int(path.read_text())
    return found


def _happen(fault: Fault, place: Path, child: "subprocess.Popen[bytes]") -> bool:
    """Send the signal; False if there is nobody yet to get it."""
    pid = child.pid if fault.rank < 0 else _pids(place).get(fault.rank)
    if pid is None:
        return False
    try:
        os.kill(pid, _SIGNALS[fault.kind])
    except ProcessLookupError:
        return False
    return True


def _account(happened: list[Happened], step: int) -> None:
    """See how far the last fault has thrown the run back, and when it has made up for that."""
    if not happened or happened[-1].seconds > 0:
        return
    last = happened[-1]
    if step < last.step:
        last.lost_steps = max(last.lost_steps, last.step - step)
    elif step > last.step:
        last.seconds = time.perf_counter() - last.began


def _sample(place: Path, step: int) -> list[Sample]:
    found: list[Sample] = []
    page = os.sysconf("SC_PAGE_SIZE")
    for rank, pid in sorted(_pids(place).items()):
        with contextlib.suppress(OSError):
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
            found.append(Sample(step, rank, resident, len(os.listdir(f"/proc/{pid}/fd"))))
    return found


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write what ranks needed as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Sample._fields)
        writer.writerows(samples)


def read_samples(path: Path) -> list[Sample]:
    """Read what `write_samples` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Sample(*map(int, row)) for row in list(csv.reader(file))[1:]]


def growth(samples: Sequence[Sample], num_steps: int) -> list[tuple[int, float, int]]:
    """By rank: how much its memory grew (a share), and by how many its open files.

    From the median of the second tenth of the run to that of its last tenth.
    """
    found: list[tuple[int, float, int]] = []
    for rank in sorted({sample.rank for sample in samples}):
        own = [sample for sample in samples if sample.rank == rank]
        early = [s for s in own if SETTLED <= s.step / num_steps < 2 * SETTLED]
        late = [s for s in own if s.step / num_steps >= 1 - SETTLED]
        if early and late:
            memory = [median(s.resident_bytes for s in part) for part in (early, late)]
            files = [median(s.open_files for s in part) for part in (early, late)]
            found.append((rank, memory[1] / memory[0] - 1, int(files[1] - files[0])))
    return found


def largest_difference(one: Path, other: Path) -> float:
    """Between the weights of two runs."""
    ours, theirs = (load_file(run / "model.safetensors") for run in (one, other))
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"{one} and {other} are runs of different models")
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def report(options: SoakBench, left_alone: Path, broken: Ended, samples: Sequence[Sample]) -> str:
    """The page."""
    rows = map(json.loads, (left_alone / "metrics.jsonl").read_text().splitlines())
    useful_seconds = sum(row.get("step_seconds", 0.0) for row in rows)
    goodput = useful_seconds / broken.wall_seconds
    grown = growth(samples, options.steps)
    by_kind = [
        (
            kind,
            len(those),
            _mean_and_most([fault.lost_steps for fault in those]),
            _mean_and_most([fault.seconds for fault in those]),
        )
        for kind in get_args(Kind)
        if (those := [fault for fault in broken.faults if fault.kind == kind])
    ]
    table = tabulate(
        by_kind,
        headers=["fault", "times", "steps done again", "seconds until it was past the step"],
        tablefmt="github",
        disable_numparse=True,
    )
    difference = largest_difference(left_alone, broken.folder)
    layout = (
        f"{options.stages} stages × {options.dp} replicas, {options.microbatches} micro-batches"
    )
    memory = "; ".join(
        f"rank {rank} {share:+.2%}, {files:+d} files" for rank, share, files in grown
    )
    return (
        f"# {options.steps} steps and {len(broken.faults)} faults\n\n"
        f"{options.model} on {options.data}, {layout}, batch {options.batch_size}, a checkpoint "
        f"every {options.checkpoint_every} steps, a fault about every {options.faults_every}, "
        f"--timeout {options.timeout:g}, seed {options.seed}.\n\n{table}\n\n"
        f"- Largest difference between its final weights and those of the run that was left "
        f"alone: {difference:g}\n"
        f"- Goodput: {goodput:.1%} ({options.steps} steps, which took the run that was left alone "
        f"{useful_seconds:.0f} s, {useful_seconds / options.steps:.3f} s each, in "
        f"{broken.wall_seconds:.0f} s from the first start to the end)\n"
        f"- From its second tenth to its last, the run that was left alone grew by: {memory}\n\n"
        f"kill: SIGKILL to a rank. freeze: SIGSTOP to a rank. stop: SIGTERM to the launcher, which "
        "ends in exit code 75 and is started again.\n\n"
        + origin(torch.device("cpu"), "1 thread a rank")
    )


def _mean_and_most(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f} (at most {max(values):.1f})"
