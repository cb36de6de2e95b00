"""Twenty runs with a fault each: how they end, what they leave, whether they go on bit for bit.

    python -m tests.faults [WORD ...]

prints a row for each fault, of those whose row has one of the words, and ends with 1 if one is not
as it must be. It takes some minutes on two cores. The disk that fills up is a tmpfs, and the hosts
are those of slurm/hosts.sh, so it needs root; both are gone at the end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM
from typing import NamedTuple

from safetensors.numpy import load_file

from tests.small_digits import SMALL_DIGITS, among_small_digits
from tests.world import ROOT, Command, start_command, wait_until
from vigpipe.run.follow import last_step

STEPS, EVERY, FAULT_AT = 60, 8, 20  # of a run, between checkpoints, and after which it happens
STAGES = ("--stages", "2", "--microbatches", "2")
REPLICAS = ("--dp", "2")
FOUR = (*STAGES, *REPLICAS)
READERS = (*REPLICAS, "--workers", "1")
OPTIONS = (*SMALL_DIGITS, "--batch-size", "24", "--threads", "1", "--timeout", "10")
OPTIONS += ("--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--evaluate-every", "100")
TRAIN = (sys.executable, "-m", "vigpipe", "train", *OPTIONS)
PARENT = (sys.executable, str(Path(__file__).with_name("parent.py")))
HOSTS = str(ROOT / "slurm" / "hosts.sh")
PORT = "29600"
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

    @property
    def server(self) -> int:
        return parent_of(self.ranks[0])

    @property
    def readers(self) -> list[int]:
        """The processes of the servers of ranks, each of which has its readers."""
        processes = self.commands[0].processes()
        servers = {pid for pid in processes if parent_of(pid) in self.ranks}
        return sorted(pid for pid in processes if parent_of(pid) in servers)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def send(*signals: tuple[signal.Signals, str]) -> Callable[[Run], None]:
    """Make a fault of signals, each to `launcher`, `server`, `rankN`, `readerN` or `all`."""

    def fault(run: Run) -> None:
        found = {"launcher": run.launcher, "server": run.server}
        found |= {f"rank{n}": pid for n, pid in enumerate(run.ranks)}
        found |= {f"reader{n}": pid for n, pid in enumerate(run.readers)}
        for number, name in signals:
            pids = found.values() if name == "all" else [found[name]]
            for pid in pids:
                os.kill(pid, number)

    return fault


def fill_the_disk(run: Run) -> None:
    """Leave no room until a checkpoint was due, as somebody's files would; kill a rank then."""
    filler = run.out.with_name("filler")
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    first = run.commands[0]
    said = first.folder / "stdout"
    failed = "could not be written"
    wait_until(lambda: failed in said.read_text(), "a checkpoint has no room", running=first)
    os.kill(run.ranks[1], SIGKILL)
    filler.unlink()


def cut_off(run: Run) -> None:
    """Take the second host's only interface down."""
    subprocess.run([HOSTS, "run", "host2", "ip", "link", "set", "eth0", "down"], check=True)


@dataclass(frozen=True)
class Fault:
    """A fault, the run that it happens to, and how that must end."""

    happen: Callable[[Run], None]
    layout: tuple[str, ...]
    codes: tuple[int, ...]  # of the commands
    where: str = "local"


class Seen(NamedTuple):
    """What became of a run after its fault."""

    codes: tuple[int, ...]
    seconds: float  # until the last command had ended
    step: int  # the last one of which metrics.jsonl has a row
    told: str  # the first command's last line
    left: list[str]  # files
    is_equal: bool  # whether it went on, and to the weights of a run without a fault


FAULTS = {
    "SIGKILL to rank 0": Fault(send((SIGKILL, "rank0")), STAGES, (137,)),
    "SIGKILL to rank 1": Fault(send((SIGKILL, "rank1")), REPLICAS, (137,)),
    "SIGKILL to rank 3": Fault(send((SIGKILL, "rank3")), FOUR, (137,)),
    "SIGKILL to both ranks": Fault(send((SIGKILL, "rank0"), (SIGKILL, "rank1")), REPLICAS, (137,)),
    "SIGSTOP to rank 1": Fault(send((SIGSTOP, "rank1")), STAGES, (70,)),
    "SIGSTOP to rank 0, SIGKILL to rank 1": Fault(
        send((SIGSTOP, "rank0"), (SIGKILL, "rank1")), STAGES, (137,)
    ),
    "SIGTERM to the launcher": Fault(send((SIGTERM, "launcher")), FOUR, (75,)),
    "SIGHUP to the launcher": Fault(send((SIGHUP, "launcher")), REPLICAS, (75,)),
    "SIGINT to all": Fault(send((SIGINT, "all")), STAGES, (130,)),
    "SIGKILL to rank 1, SIGTERM to the launcher": Fault(
        send((SIGKILL, "rank1"), (SIGTERM, "launcher")), REPLICAS, (143,)
    ),
    "SIGKILL to the launcher": Fault(send((SIGKILL, "launcher")), STAGES, (137,)),
    "SIGSTOP to rank 1, SIGKILL to the launcher": Fault(
        send((SIGSTOP, "rank1"), (SIGKILL, "launcher")), STAGES, (137,)
    ),
    "SIGSTOP to a reader, SIGKILL to the launcher": Fault(
        send((SIGSTOP, "reader0"), (SIGKILL, "launcher")), READERS, (137,)
    ),
    "SIGSTOP to all, SIGKILL to the launcher": Fault(
        send((SIGSTOP, "all"), (SIGKILL, "launcher")), READERS, (137,)
    ),
    "SIGKILL to the fork server": Fault(send((SIGKILL, "server")), REPLICAS, (70,)),
    "SIGKILL to the fork server and the launcher": Fault(
        send((SIGKILL, "server"), (SIGKILL, "launcher")), STAGES, (137,)
    ),
    "SIGKILL to a reader": Fault(send((SIGKILL, "reader1")), READERS, (70,)),
    "the disk is full at a checkpoint, then SIGKILL to rank 1": Fault(
        fill_the_disk, STAGES, (137,), "disk"
    ),
    "an interface goes down": Fault(cut_off, REPLICAS, (70, 70), "hosts"),
    "an interface goes down under torchrun": Fault(cut_off, REPLICAS, (1, -9), "torchrun"),
}


@contextlib.contextmanager
def started(fault: Fault, out: Path, temporary: Path, *more: str) -> Iterator[Run]:
    """Start the commands of a run; what is left of them is killed with the context."""
    words = (*TRAIN, *fault.layout, "--out", str(out), *more)
    variables = {"TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}
    lines: list[tuple[list[str], dict[str, str]]] = [([*PARENT, *words], variables)]
    if fault.where in ("hosts", "torchrun"):
        module = words[1:]
        run = ("-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d")
        run += ("--rdzv-endpoint", f"host1:{PORT}", "--rdzv-id", "x")
        lines = []
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            place |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "host1", "MASTER_PORT": PORT}
            python = (sys.executable, *(run if fault.where == "torchrun" else ()))
            line = [HOSTS, "run", f"host{rank + 1}", *python, *module]
            lines.append((line, variables | (place if fault.where == "hosts" else {})))
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
    with started(Fault(cut_off, layout, (0,)), out, folder) as run:
        assert run.commands[0].wait().returncode == 0
    return out


def suffer(fault: Fault, folder: Path) -> Seen:
    """Let a fault happen to a run, and go on; return what was seen."""
    out, temporary = folder / "disk" / "run", folder / "temporary"
    for made in (out.parent, temporary):
        made.mkdir(parents=True)
    with on_a_disk(out.parent) if fault.where == "disk" else contextlib.nullcontext():
        with started(fault, out, temporary) as run:
            first = run.commands[0]
            wait_until(lambda: last_step(out) >= FAULT_AT, "the step of the fault", running=first)
            fault.happen(run)
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
        if fault.where in ("hosts", "torchrun"):
            subprocess.run([HOSTS, "run", "host2", "ip", "link", "set", "eth0", "up"], check=True)
        before = last_step(out)
        with started(fault, out, temporary, "--resume", "auto") as run:
            resumed = [command.wait(120).returncode for command in run.commands]
        left += [*temporary.iterdir(), *out.glob("**/.vigpipe-*")]
        expected, found = (
            load_file(path / "model.safetensors")
            for path in (unbroken(fault.layout, folder.parent), out)
        )
    is_equal = expected.keys() == found.keys() and all(
        expected[name].tobytes() == found[name].tobytes() for name in expected
    )
    names = [path.name for path in left if not path.name.startswith("torchelastic_")]  # torchrun's
    return Seen(tuple(codes), seconds, before, "".join(told), names, is_equal and not any(resumed))


@contextlib.contextmanager
def on_a_disk(folder: Path) -> Iterator[None]:
    """Let a folder be a small disk of its own."""
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs"]
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main(words: Sequence[str]) -> int:
    """Print the table; return 1 if a row is not as it must be."""
    chosen = {
        what: fault
        for what, fault in FAULTS.items()
        if not words or any(word in what for word in words)
    }
    wrong = 0
    print("| fault | layout | exit code | ended after | left behind | goes on bit for bit |")
    print("|---|---|---|---|---|---|")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(among_small_digits(folder))
        if any(fault.where in ("hosts", "torchrun") for fault in chosen.values()):
            os.environ["VIGPIPE_HOSTS_DIR"] = str(folder / "hosts")
            subprocess.run([HOSTS, "start", "2"], check=True)
            stack.callback(subprocess.run, [HOSTS, "stop"], check=True)
        for number, (what, fault) in enumerate(chosen.items()):
            seen = suffer(fault, folder / str(number))
            is_right = seen.codes == fault.codes and not seen.left and seen.is_equal
            wrong += not is_right
            codes, left = ", ".join(map(str, seen.codes)), ", ".join(seen.left) or "nothing"
            layout, goes_on = " ".join(fault.layout), "yes" if seen.is_equal else "NO"
            row = f"| {what} | `{layout}` | {codes} | {seen.seconds:.1f} s | {left} | {goes_on} |"
            print(row, flush=True)
            if not is_right:
                print(f"expected {fault.codes}: {seen}", file=sys.stderr, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
