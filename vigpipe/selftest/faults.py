"""Does a run end when a rank is killed or frozen, does it say so, and can it go on afterwards?"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vigpipe.checkpoint.manifest import list_checkpoints
from vigpipe.config.choices import Device
from vigpipe.errors import DONE, PEER_LOST
from vigpipe.launch.local import find_ranks
from vigpipe.report.markup import paragraph
from vigpipe.run.follow import last_step
from vigpipe.selftest.command import command, exit_code, read_output, run_command
from vigpipe.selftest.machine import Machine
from vigpipe.selftest.rows import Budget, Row, attempt
from vigpipe.selftest.tables import Column, rows_table
from vigpipe.selftest.worker import OutOfTime, last_line

MOST_SECONDS = 180.0
POLL_SECONDS = 0.02
ENDLESS = 1_000_000  # steps


@dataclass(frozen=True)
class Fault:
    """A fault, and how a run must end after it."""

    what: str  # the fault and the ranks, in words
    signal: signal.Signals  # what the last rank is sent
    num_ranks: int  # stages; a single rank is the process of the command itself
    device: Device
    code: int  # the exit code that must follow
    timeout: int  # --timeout in seconds, after which a frozen rank is noticed


def faults(machine: Machine) -> list[Fault]:
    """Return the faults to try: of two GPUs if there are two, else of two ranks on the CPU."""
    killed, frozen = 128 + signal.SIGKILL, PEER_LOST
    on_gpus = len(machine.gpus) >= 2
    device: Device = "cuda" if on_gpus else "cpu"
    timeout = 30 if on_gpus else 8
    where = "of 2 GPUs (NCCL)" if on_gpus else "of 2 ranks on the CPU (gloo)"
    found = [
        Fault(f"one {where} is killed", signal.SIGKILL, 2, device, killed, timeout),
        Fault(f"one {where} is frozen", signal.SIGSTOP, 2, device, frozen, timeout),
    ]
    if len(machine.gpus) == 1:
        found.insert(0, Fault("the only GPU's rank", signal.SIGKILL, 1, "cuda", killed, timeout))
    return found


def measure(machine: Machine, budget: Budget) -> Iterator[Row]:
    """Let the faults happen, each in a run of its own."""
    for fault in faults(machine):
        about = fault.timeout * (fault.code == PEER_LOST) + 25.0
        yield from attempt(fault.what, budget, about, MOST_SECONDS, partial(suffer, fault))


def suffer(fault: Fault, seconds: float) -> list[Row]:
    """Train, let the fault happen after a checkpoint, and go on from the checkpoint."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="vigpipe-selftest-") as name:
        temporary = Path(name)
        folder = temporary / "run"
        endless = [*_words(fault, folder), "--steps", str(ENDLESS)]
        with command(endless, temporary) as child:
            _wait_for_checkpoint(folder, child, deadline, temporary / "stderr")
            os.kill(_pid(fault, child.pid), fault.signal)
            began = time.monotonic()
            code = exit_code(child, deadline - began)
            ended_after = time.monotonic() - began
        told = read_output(temporary / "stderr").strip().splitlines()
        before = last_step(folder)
        saved = list_checkpoints(folder)
        goal = before + 2
        words = [*_words(fault, folder), "--steps", str(goal), "--resume", "auto"]
        resumed = run_command(words, max(1.0, deadline - time.monotonic()))
        values = {
            "code": code,
            "expected": fault.code,
            "told": told[-1] if told else "",
            "seconds": ended_after,
            "step": before,
            "checkpoint": saved[0].name if saved else "",
            "resumed": resumed.code == DONE and last_step(folder) == goal,
        }
    return [judge(fault, values)]


def judge(fault: Fault, values: Mapping[str, object]) -> Row:
    """Say what is wrong with the values that `suffer` has seen, if anything is."""
    wrong = []
    if values["code"] != fault.code:
        wrong.append(f"it ended with {values['code']} instead of {fault.code}")
    if fault.num_ranks > 1 and f"rank {fault.num_ranks - 1} " not in str(values["told"]):
        wrong.append("its last line does not name the rank")
    if not values["resumed"]:
        wrong.append("it did not go on from its checkpoint")
    return Row(fault.what, "failed" if wrong else "passed", values, "; ".join(wrong))


def _words(fault: Fault, folder: Path) -> list[str]:
    words = (
        f"train --model vig_digits --stages {fault.num_ranks} --microbatches 2 --batch-size 24 "
        f"--epochs {ENDLESS} --evaluate-every {ENDLESS} --checkpoint-every 5 --threads 1 "
        f"--timeout {fault.timeout} --device {fault.device}"
    )
    return [*words.split(), "--out", str(folder)]


def _pid(fault: Fault, launcher: int) -> int:
    """Return the process id of the last rank."""
    return launcher if fault.num_ranks == 1 else find_ranks(launcher)[fault.num_ranks - 1]


def _wait_for_checkpoint(
    folder: Path, child: "subprocess.Popen[bytes]", deadline: float, stderr: Path
) -> None:
    while not list_checkpoints(folder):
        if child.poll() is not None:
            last = last_line(read_output(stderr))
            raise RuntimeError(f"the run ended with {child.returncode} before the fault: {last}")
        if time.monotonic() > deadline:
            raise OutOfTime("the run has saved no checkpoint")
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)


def section(rows: Sequence[Row]) -> Iterator[str]:
    """Show how the runs have ended, and how soon."""
    yield paragraph(
        "Seconds: from the signal until the last process has ended. A frozen rank is noticed at "
        "--timeout. Then the same command goes on with --resume auto.",
        "note",
    )
    columns = (
        Column("exit code", "code", "{}"),
        Column("expected", "expected", "{}"),
        Column("seconds", "seconds", "{:.1f}"),
        Column("goes on from", "checkpoint", "{}"),
        Column("goes on", "resumed", lambda did: "yes" if did else "no"),
        Column("its last line", "told", "{}"),
    )
    yield rows_table("fault", rows, columns, style="runs")
