"""Does a long run with many faults end with the same weights as one without?

Two runs have the same command line: one is left alone, and in the other one ranks are killed,
frozen and asked to stop at steps that a seed chooses. The page reports:

    weights    the largest difference between the two at the end
    memory     the growth of memory and open files of the ranks of the run that is left alone
    goodput    the seconds of the steps in the run that is left alone / the wall time of the other
               run, from its first start to its last end, with restarts, checkpoints and steps
               done twice
"""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors.torch import load_file
from tabulate import tabulate

from benchmarks.options import SoakBench
from vigpipe.config.options import flag
from vigpipe.errors import DONE, INTERRUPTED, SAVED, InputError
from vigpipe.launch.child import stoppable
from vigpipe.launch.local import find_ranks
from vigpipe.launch.signals import Stopped
from vigpipe.run.folder import make_output_folder
from vigpipe.run.follow import last_step
from vigpipe.run.provenance import origin

Kind = Literal["kill", "freeze", "stop"]
POLL_SECONDS = 0.05
SETTLED = 0.1  # share of the steps after which memory must not grow
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "stop": signal.SIGTERM}


class Fault(NamedTuple):
    """A fault that is planned."""

    step: int  # number of steps after which it happens
    kind: Kind  # SIGKILL (kill) or SIGSTOP (freeze) to a rank, or SIGTERM (stop) to the launcher
    rank: int  # rank that gets the signal; -1 for the launcher


@dataclass
class Happened:
    """A fault that has happened, and what it cost."""

    step: int  # number of steps that were done when it happened
    kind: Kind  # kill, freeze or stop
    rank: int  # rank that got the signal; -1 for the launcher
    began: float  # time of the fault on time.perf_counter
    lost_steps: int = 0  # number of steps that had to be done again
    # Seconds from the fault until the run got beyond the steps that had been done.
    seconds: float = 0.0


class Sample(NamedTuple):
    """Memory and open files of one rank at a step."""

    step: int
    rank: int
    resident_bytes: int
    open_files: int


@dataclass(frozen=True)
class Ended:
    """A run that has ended, from its first start to its last end."""

    folder: Path
    wall_seconds: float
    faults: list[Happened]
    samples: list[Sample]


def bench_soak(options: SoakBench) -> None:
    """Run both and write README.md, faults.csv and memory.csv; a signal ends the runs as well.

    Raises:
        InputError: an option is out of range, or a run ended with an unexpected exit code.
    """
    check_options(options)
    try:
        with stoppable():
            _soak(options)
    except Stopped:
        sys.exit(INTERRUPTED)


def check_options(options: SoakBench) -> None:
    """Raise InputError for an option that the runs would refuse under another name, or later."""
    least = {"steps": 1, "checkpoint_every": 1, "faults_every": 0, "timeout": 1}
    least |= dict.fromkeys(("stages", "dp", "microbatches", "batch_size"), 1)
    for name, smallest in least.items():
        value = getattr(options, name)
        if not smallest <= value <= 1e6:
            raise InputError(f"{flag(name)} {value}: must be a number from {smallest} to 1e+06")


def _soak(options: SoakBench) -> None:
    folder = make_output_folder(options.out, ("README.md", "faults.csv", "memory.csv", "run"))
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
    """Choose a fault of random kind and rank about every `faults_every` steps."""
    generator = random.Random(options.seed)
    faults: list[Fault] = []
    step = 0.0
    while options.faults_every:
        step += generator.uniform(0.5, 1.5) * options.faults_every
        if step >= options.steps:
            break
        kind = generator.choice(get_args(Kind))
        rank = generator.randrange(options.stages * options.dp)
        faults.append(Fault(int(step), kind, -1 if kind == "stop" else rank))
    return faults


def command_of(folder: Path, options: SoakBench) -> list[str]:
    """Make the command line of a run, which is the same for all its starts."""
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
    """Start a run, let the faults happen, and start it again whenever it exits to be restarted.

    Args:
        folder: folder of the run.
        options: options of the benchmark.
        faults: faults in the order of their steps; may be empty.

    Raises:
        InputError: the run ended with an unexpected exit code.
    """
    happened: list[Happened] = []
    samples: list[Sample] = []
    coming = list(faults)
    began = time.perf_counter()
    code = DONE
    for _ in range(len(faults) + 1):
        with _started(command_of(folder, options)) as child:
            while child.poll() is None:
                step = last_step(folder)
                _account(happened, step)
                if samples[-1:] == [] or step >= samples[-1].step + options.checkpoint_every:
                    samples += _sample(find_ranks(child.pid), step)
                if coming and step >= coming[0].step and _send_signal(coming[0], child.pid):
                    fault = coming.pop(0)
                    happened.append(Happened(step, fault.kind, fault.rank, time.perf_counter()))
                time.sleep(POLL_SECONDS)
        code = child.returncode
        if code == DONE:
            _account(happened, options.steps + 1)
            return Ended(folder, time.perf_counter() - began, happened, samples)
        if code != SAVED:
            break
        happened[-1].step = last_step(folder)  # it had gone on to the end of its step
        happened[-1].seconds = 0.0
    raise InputError(f"{folder}: the run ended with exit code {code}, for the reason above")


@contextlib.contextmanager
def _started(command: list[str]) -> "Iterator[subprocess.Popen[bytes]]":
    child = subprocess.Popen(
        command,
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


def _send_signal(fault: Fault, launcher: int) -> bool:
    """Send the signal of a fault; return False if its process does not run yet."""
    pid = launcher if fault.rank < 0 else find_ranks(launcher).get(fault.rank)
    if pid is None:
        return False
    try:
        os.kill(pid, _SIGNALS[fault.kind])
    except ProcessLookupError:
        return False
    return True


def _account(happened: list[Happened], step: int) -> None:
    """Update the cost of the last fault: steps that are lost, and seconds until they are done."""
    if not happened or happened[-1].seconds > 0:
        return
    last = happened[-1]
    if step < last.step:
        last.lost_steps = max(last.lost_steps, last.step - step)
    elif step > last.step:
        last.seconds = time.perf_counter() - last.began


def _sample(pids: Mapping[int, int], step: int) -> list[Sample]:
    samples: list[Sample] = []
    page = os.sysconf("SC_PAGE_SIZE")
    for rank, pid in sorted(pids.items()):
        with contextlib.suppress(OSError):
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
            samples.append(Sample(step, rank, resident, len(os.listdir(f"/proc/{pid}/fd"))))
    return samples


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples of memory as a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Sample._fields)
        writer.writerows(samples)


def read_samples(path: Path) -> list[Sample]:
    """Read samples that `write_samples` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Sample(*map(int, row)) for row in list(csv.reader(file))[1:]]


def growth(samples: Sequence[Sample], num_steps: int) -> list[tuple[int, float, int]]:
    """Compute how much the ranks grew, from the second tenth of the run to its last tenth.

    Returns:
        (rank, growth of the median memory as a share, growth of the median number of open files).
    """
    grown: list[tuple[int, float, int]] = []
    for rank in sorted({sample.rank for sample in samples}):
        of_rank = [sample for sample in samples if sample.rank == rank]
        early = [s for s in of_rank if SETTLED <= s.step / num_steps < 2 * SETTLED]
        late = [s for s in of_rank if s.step / num_steps >= 1 - SETTLED]
        if early and late:
            memory = [median(s.resident_bytes for s in period) for period in (early, late)]
            files = [median(s.open_files for s in period) for period in (early, late)]
            grown.append((rank, memory[1] / memory[0] - 1, int(files[1] - files[0])))
    return grown


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest difference between the weights of two runs."""
    weights, other_weights = (load_file(run / "model.safetensors") for run in (one, other))
    if weights.keys() != other_weights.keys():
        raise RuntimeError(f"{one} and {other} are runs of different models")
    return max(
        float((weights[name].double() - other_weights[name].double()).abs().max())
        for name in weights
    )


def report(options: SoakBench, left_alone: Path, broken: Ended, samples: Sequence[Sample]) -> str:
    """Write the page about both runs as Markdown.

    Args:
        options: options of the benchmark.
        left_alone: folder of the run without faults.
        broken: the run with faults.
        samples: memory of the ranks of the run without faults.
    """
    rows = map(json.loads, (left_alone / "metrics.jsonl").read_text().splitlines())
    useful_seconds = sum(row.get("step_seconds", 0.0) for row in rows)
    goodput = useful_seconds / broken.wall_seconds
    grown = growth(samples, options.steps)
    by_kind = [
        (
            kind,
            len(faults),
            _mean_and_most([fault.lost_steps for fault in faults]),
            _mean_and_most([fault.seconds for fault in faults]),
        )
        for kind in get_args(Kind)
        if (faults := [fault for fault in broken.faults if fault.kind == kind])
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
