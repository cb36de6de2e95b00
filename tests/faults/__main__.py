"""Twenty runs with a fault each: how they end, what they leave, whether they go on bit for bit.

    python -m tests.faults [WORD ...]

prints a row for each fault, of those whose row has one of the words, and ends with 1 if there is
none, or one is not as it must be. It takes some minutes on two cores. The disk that fills up is a
tmpfs, and the hosts are those of slurm/hosts.sh, so it needs root; both are gone at the end.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Literal, NamedTuple

import psutil

from tests.faults.table import Case, Row, print_table
from tests.hosts import TORCHRUN, change, on_host, ranks_by_hand
from tests.small_digits import SMALL_DIGITS
from tests.world import Command, start_command, wait_until
from vigpipe.run.follow import last_step

STEPS, EVERY, FAULT_AT = 60, 8, 20  # of a run, between checkpoints, and after which it happens
STAGES = ("--stages", "2", "--microbatches", "2")
REPLICAS = ("--dp", "2")
FOUR = (*STAGES, *REPLICAS)
READERS = (*REPLICAS, "--workers", "1")
OPTIONS = (*SMALL_DIGITS, "--batch-size", "24", "--threads", "1", "--timeout", "10")
OPTIONS += ("--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--evaluate-every", "100")
PARENT = (sys.executable, str(Path(__file__).with_name("parent.py")))
DISK_BYTES = 64 << 20


@dataclass
class Run:
    """A run under way, or one that has ended."""

    commands: Sequence[Command]
    out: Path
    temporary: Path

    @property
    def launcher(self) -> int:
        return int((self.commands[0].folder / "stdout").read_text().splitlines()[0])

    @property
    def ranks(self) -> list[int]:
        paths = self.temporary.glob("pymp-*/vigpipe-*/rank*.pid")
        return [int(path.read_text()) for path in sorted(paths)]

    def find(self, who: str) -> list[int]:
        """Return the process ids of what the words of a fault name."""
        ranks = self.ranks
        server = psutil.Process(ranks[0]).parent()
        assert server is not None
        # A rank has a fork server of its own, and that has the rank's readers.
        servers = [child for rank in ranks for child in psutil.Process(rank).children()]
        readers = sorted(reader.pid for one in servers for reader in one.children())
        found = {f"rank {number}": [pid] for number, pid in enumerate(ranks)}
        found |= {"both ranks": ranks, "the launcher": [self.launcher]}
        found |= {"the fork server": [server.pid], "a reader": readers[-1:]}
        found["all"] = [self.launcher, server.pid, *ranks, *readers]
        return found[who]


def send(what: str, run: Run) -> None:
    """Send the signals that the words of a fault name, in their order."""
    pairs = re.findall(r"(SIG[A-Z]+) to ([a-z0-9 ]+)", what)
    for number, pid in [(name, pid) for name, who in pairs for pid in run.find(who)]:
        os.kill(pid, Signals[number])


def fill_the_disk(run: Run) -> None:
    """Leave no room, as somebody's files would, until a checkpoint was due."""
    with contextlib.suppress(OSError), filler(run).open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    first = run.commands[0]
    said, failed = first.folder / "stdout", "could not be written"
    wait_until(lambda: failed in said.read_text(), "a checkpoint has no room", running=first)


def filler(run: Run) -> Path:
    return run.out.with_name("filler")


class Fault(NamedTuple):
    """A run that a fault happens to, and how it must end."""

    layout: tuple[str, ...]
    codes: tuple[int, ...]  # of the commands
    where: Literal["here", "disk", "hosts", "torchrun"] = "here"

    @property
    def has_hosts(self) -> bool:
        return self.where in ("hosts", "torchrun")


class Seen(NamedTuple):
    """What became of a run after its fault."""

    codes: tuple[int, ...]
    seconds: float  # until the last command had ended
    step: int  # the last one of which metrics.jsonl has a row
    told: str  # the first command's last line
    left: list[str]  # files
    is_equal: bool  # whether it went on, and to the weights of a run without a fault


# By what happens: the words name the signals, but for a disk that is full and for a network.
FAULTS = {
    "SIGKILL to rank 0": Fault(STAGES, (137,)),
    "SIGKILL to rank 1": Fault(REPLICAS, (137,)),
    "SIGKILL to rank 3": Fault(FOUR, (137,)),
    "SIGKILL to both ranks": Fault(REPLICAS, (137,)),
    "SIGSTOP to rank 1": Fault(STAGES, (70,)),
    "SIGSTOP to rank 0, SIGKILL to rank 1": Fault(STAGES, (137,)),
    "SIGTERM to the launcher": Fault(FOUR, (75,)),
    "SIGHUP to the launcher": Fault(REPLICAS, (75,)),
    "SIGINT to all": Fault(STAGES, (130,)),
    # Else it may see the end of the rank first.
    (
        "SIGSTOP to the launcher, SIGKILL to rank 1, "
        "SIGTERM to the launcher, SIGCONT to the launcher"
    ): Fault(REPLICAS, (143,)),
    "SIGKILL to the launcher": Fault(STAGES, (137,)),
    "SIGSTOP to rank 1, SIGKILL to the launcher": Fault(STAGES, (137,)),
    "SIGSTOP to a reader, SIGKILL to the launcher": Fault(READERS, (137,)),
    "SIGSTOP to all, SIGKILL to the launcher": Fault(READERS, (137,)),
    "SIGKILL to the fork server": Fault(REPLICAS, (70,)),
    "SIGKILL to the fork server, SIGKILL to the launcher": Fault(STAGES, (137,)),
    "SIGKILL to a reader": Fault(READERS, (70,)),
    "the disk is full at a checkpoint, then SIGKILL to rank 1": Fault(STAGES, (137,), "disk"),
    "an interface goes down": Fault(REPLICAS, (70, 70), "hosts"),
    "an interface goes down under torchrun": Fault(REPLICAS, (1, -9), "torchrun"),
}


def happen(what: str, where: str, run: Run) -> None:
    """Let a fault happen."""
    if where == "disk":
        fill_the_disk(run)
    elif where != "here":  # the second host's only interface
        change({}, "down", "host2")
    send(what, run)
    if where == "disk":
        filler(run).unlink()


@contextlib.contextmanager
def started(fault: Fault, out: Path, temporary: Path, *more: str) -> Iterator[Run]:
    """Start the commands of a run; what is left of them is killed with the context."""
    words = ("-m", "vigpipe", "train", *OPTIONS, *fault.layout, "--out", str(out), *more)
    variables = {"TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}
    lines = [((*PARENT, sys.executable, *words), variables)]
    if fault.has_hosts:
        lines = [
            ((*on_host(host), *words), variables | place)
            if fault.where == "hosts"
            else ((*on_host(host), *TORCHRUN, *words), variables)
            for host, place in ranks_by_hand([1, 1])
        ]
    with contextlib.ExitStack() as stack:
        yield Run(
            [stack.enter_context(start_command(line, env, fresh=True)) for line, env in lines],
            out,
            temporary,
        )


@cache
def unbroken(layout: tuple[str, ...], folder: Path) -> Path:
    """Train without a fault, and return the folder of the run."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    with started(Fault(layout, (0,)), out, folder) as run:
        assert run.commands[0].wait().returncode == 0
    return out


def suffer(what: str, fault: Fault, folder: Path) -> Seen:
    """Let a fault happen to a run, and go on; return what was seen."""
    out, temporary = folder / "disk" / "run", folder / "temporary"
    for made in (out.parent, temporary):
        made.mkdir(parents=True)
    with on_a_disk(out.parent) if fault.where == "disk" else contextlib.nullcontext():
        with started(fault, out, temporary) as run:
            first = run.commands[0]
            wait_until(lambda: last_step(out) >= FAULT_AT, "the step of the fault", running=first)
            happen(what, fault.where, run)
            began = time.monotonic()
            codes = []
            for command in run.commands:
                if codes and fault.where == "torchrun":
                    # Its rank has ended, but torch's agent waits for the first host, for minutes.
                    record = out / "failed-rank1.json"
                    wait_until(record.exists, "the rank that was cut off says why it has failed")
                    os.killpg(command.popen.pid, SIGKILL)
                codes.append(command.wait(90).returncode)
            seconds = time.monotonic() - began
            told = (first.folder / "stderr").read_text().splitlines()[-1:]
        left = list(temporary.iterdir())
        if fault.has_hosts:
            change({}, "up", "host2")
        before = last_step(out)
        with started(fault, out, temporary, "--resume", "auto") as run:
            resumed = [command.wait(120).returncode for command in run.commands]
        left += [*temporary.iterdir(), *out.glob("**/.vigpipe-*")]
        files = unbroken(fault.layout, folder.parent), out
        expected, found = ((run / "model.safetensors").read_bytes() for run in files)
    names = [path.name for path in left if not path.name.startswith("torchelastic_")]  # torchrun's
    goes_on = expected == found and not any(resumed)
    return Seen(tuple(codes), seconds, before, "".join(told), names, goes_on)


@contextlib.contextmanager
def on_a_disk(folder: Path) -> Iterator[None]:
    """Let a folder be a small disk of its own."""
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs"]
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def row_of(what: str, fault: Fault, folder: Path) -> Row:
    """Let a fault happen to a run, and make a row of what was seen."""
    seen = suffer(what, fault, folder)
    codes, left = ", ".join(map(str, seen.codes)), ", ".join(seen.left) or "nothing"
    layout, goes_on = " ".join(fault.layout), "yes" if seen.is_equal else "NO"
    cells = what, f"`{layout}`", codes, f"{seen.seconds:.1f} s", left, goes_on
    is_right = seen.codes == fault.codes and not seen.left and seen.is_equal
    return Row(cells, is_right, f"expected {fault.codes}: {seen}")


def main(words: Sequence[str]) -> int:
    """Print the table; return 1 if a row is not as it must be, or none has one of the words."""
    heads = "fault", "layout", "exit code", "ended after", "left behind", "goes on bit for bit"
    cases = {
        what: Case(partial(row_of, what, fault), num_hosts=2 * fault.has_hosts)
        for what, fault in FAULTS.items()
    }
    return print_table(heads, cases, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
