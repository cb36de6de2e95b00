"""Thirty runs over hosts with a fault of a link each: how they end, and how they go on.

    python -m tests.faults.links [WORD ...]

prints a row for each fault, of those whose row has one of the words, and ends with 1 if there
is none, or one is not as it must be. It takes 15 minutes on two cores. The hosts are those of
slurm/hosts.sh, so it needs root, and Debian's iproute2 and nftables.
"""

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from tests.faults.__main__ import EVERY, FAULT_AT, REPLICAS, STAGES, STEPS
from tests.faults.table import Case, Row, print_table
from tests.hosts import change, on_host, ranks_by_hand
from tests.small_digits import SMALL_DIGITS
from tests.world import Command, start_command, wait_until
from vigpipe.run.follow import last_step, parse_rows

OPTIONS = (*SMALL_DIGITS, "--batch-size", "24", "--threads", "1", "--evaluate-every", "100")
OPTIONS += ("--steps", str(STEPS), "--checkpoint-every", str(EVERY))


class Link(NamedTuple):
    """What happens to the link of host2, by words of slurm/hosts.sh, and what ends it."""

    begin: str
    seconds: float | None  # until it ends by itself; None: when the run has ended
    end: str
    timeout: int = 10  # of the run


LINKS = {
    "down for 2 s": Link("down host2", 2, "up host2"),
    "down for 30 s, `--timeout 60`": Link("down host2", 30, "up host2", 60),
    "down for good": Link("down host2", None, "up host2"),
    "half open": Link("half-open host1 host2", None, "mend host1 host2"),
    "one direction dead": Link("cut host1 host2", None, "mend host1 host2"),
    "host frozen for 30 s": Link("freeze host2", 30, "thaw host2"),
}
DOWN_2, DOWN_30, *_ = LINKS


class Layout(NamedTuple):
    """A run with a rank on each host, and the exit codes with which they end after a fault."""

    options: tuple[str, ...]
    codes: tuple[int, ...]  # of a link that is silent for longer than the run has patience
    patient: bool  # whether 30 s of 60 are not too long: none asks for a sign of life meanwhile
    repeats: bool = True  # whether it is the same each time, bit for bit


LAYOUTS = {
    "synchronous": Layout(REPLICAS, (70, 70), patient=True),
    "pipeline": Layout(STAGES, (70, 70), patient=True),
    "periodic": Layout(
        (*REPLICAS, "--strategy", "periodic", "--average-every", "2"), (70, 70), patient=False
    ),
    "gossip": Layout((*REPLICAS, "--strategy", "gossip"), (0, 75), patient=False, repeats=False),
    "server": Layout((*REPLICAS, "--strategy", "server"), (0, 70, 0), patient=False, repeats=False),
}


class Seen(NamedTuple):
    """What became of a run after its fault."""

    codes: tuple[int, ...]
    seconds: tuple[float, ...]  # until each command had ended
    pause: float  # the longest step
    told: tuple[str, ...]  # the last line of each command on stderr
    left: list[str]  # files
    goes_on: str  # "yes" also if it has come to its end; "equal" if to the same weights


@contextlib.contextmanager
def started(
    layout: Layout, timeout: int, out: Path, temporary: Path, *more: str
) -> Iterator[list[Command]]:
    """Start a rank on each host; what is left of them is killed with the context."""
    words = ("-m", "vigpipe", "train", *OPTIONS, "--timeout", str(timeout), *layout.options)
    words += ("--out", str(out), *more)
    variables = {"TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                start_command([*on_host(host), *words], variables | place, fresh=True)
            )
            for host, place in ranks_by_hand([1] * len(layout.codes))
        ]


def happen(link: Link) -> None:
    """Let a fault happen, and end by itself if it does."""
    change({}, *link.begin.split())
    if link.seconds is not None:
        time.sleep(link.seconds)
        change({}, *link.end.split())


@cache
def unbroken(name: str, folder: Path) -> bytes:
    """Train without a fault, and return the file of weights."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    with started(LAYOUTS[name], 10, out, folder) as run:
        assert [command.wait().returncode for command in run] == [0] * len(run)
    return (out / "model.safetensors").read_bytes()


def ends(run: Sequence[Command], began: float) -> list[float]:
    """Wait until all commands have ended; return when each of them had."""
    seconds: dict[int, float] = {}

    def have_ended() -> bool:
        for number, command in enumerate(run):
            if number not in seconds and command.popen.poll() is not None:
                seconds[number] = time.monotonic() - began
        return len(seconds) == len(run)

    wait_until(have_ended, "all ranks have ended")
    return [seconds[number] for number in range(len(run))]


def suffer(link: Link, name: str, folder: Path) -> Seen:
    """Let a fault happen to a run, and go on; return what was seen."""
    layout, out, temporary = LAYOUTS[name], folder / "run", folder / "temporary"
    temporary.mkdir(parents=True)
    with started(layout, link.timeout, out, temporary) as run:
        wait_until(lambda: last_step(out) >= FAULT_AT, "the step of the fault", running=run[0])
        fault = threading.Thread(target=happen, args=(link,))
        began = time.monotonic()
        fault.start()
        seconds = ends(run, began)
        fault.join()
        if link.seconds is None:
            change({}, *link.end.split())
        ended = [command.wait() for command in run]
    left = list(temporary.iterdir())
    codes = tuple(done.returncode for done in ended)
    rows = parse_rows((out / "metrics.jsonl").read_bytes())
    is_done = (out / "summary.json").exists()
    if not is_done:
        with started(layout, link.timeout, out, temporary, "--resume", "auto") as run:
            is_done = not any([command.wait().returncode for command in run])
    left += [*temporary.iterdir(), *out.glob("**/.vigpipe-*"), *out.glob(".seen-*")]
    goes_on = "yes" if is_done else "NO"
    if is_done and layout.repeats:
        is_equal = (out / "model.safetensors").read_bytes() == unbroken(name, folder.parent)
        goes_on = "equal" if is_equal else "OTHER WEIGHTS"
    return Seen(
        codes,
        tuple(seconds),
        max(row["step_seconds"] for row in rows if "step_seconds" in row),
        tuple("".join(done.stderr.splitlines()[-1:]) for done in ended),
        [path.name for path in left],
        goes_on,
    )


def expected_codes(what: str, layout: Layout) -> tuple[int, ...]:
    is_short = what == DOWN_2 or (what == DOWN_30 and layout.patient)
    return (0,) * len(layout.codes) if is_short else layout.codes


def row_of(what: str, name: str, folder: Path) -> Row:
    """Let a fault happen to a run, and make a row of what was seen."""
    layout, seen = LAYOUTS[name], suffer(LINKS[what], name, folder)
    right = expected_codes(what, layout), [], "equal" if layout.repeats else "yes"
    codes, seconds = ", ".join(map(str, seen.codes)), ", ".join(f"{s:.0f}" for s in seen.seconds)
    left = ", ".join(seen.left) or "nothing"
    cells = what, name, codes, seconds, f"{seen.pause:.1f} s", left, seen.goes_on
    is_right = (seen.codes, seen.left, seen.goes_on) == right
    return Row(cells, is_right, f"{what}, {name}: {seen}")


def main(words: Sequence[str]) -> int:
    """Print the table; return 1 if a row is not as it must be."""
    heads = "link of host2", "run", "exit codes", "ended after, s", "longest step", "left behind"
    cases = {
        f"{what} {name}": Case(partial(row_of, what, name), num_hosts=3)
        for what in LINKS
        for name in LAYOUTS
    }
    return print_table((*heads, "goes on"), cases, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
