"""The command `vigpipe selftest`: run the parts within the budget, and write the page and the JSON.

Parts do their work in processes of their own, and this one never touches a GPU, so no part can
spoil another. Results are written after every part: a self-test that is interrupted leaves some.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vigpipe.config.verbs import SelftestConfig
from vigpipe.errors import DIFFERS, DONE, INTERRUPTED, InputError
from vigpipe.files.atomic import write_atomically
from vigpipe.launch.child import stoppable
from vigpipe.launch.signals import Stopped
from vigpipe.messages import one_line
from vigpipe.run.folder import make_output_folder
from vigpipe.run.provenance import provenance, this_command
from vigpipe.selftest import checks, faults, links, operators, profile, speed
from vigpipe.selftest.asked import budget_seconds, part_names
from vigpipe.selftest.machine import look_at_machine
from vigpipe.selftest.page import PartResult, Result, as_json, counts, page, summary
from vigpipe.selftest.rows import Budget, Part, Row, failed
from vigpipe.selftest.way import NUM_WARMUP
from vigpipe.selftest.worker import OutOfTime, WorkerError, call

PAGE, JSON = "page.html", "result.json"
LOOK_SECONDS = 120.0
PARTS_SHARE = 0.95  # Imports and writing the page take the rest of the budget.
WARM_UP = (
    f"{NUM_WARMUP} steps of every way, and one at the beginning of every turn; "
    f"{links.NUM_WARMUP} messages of every size"
)
# In the order of the run. What a part leaves goes to the later ones; speed can use any amount.
PARTS = (
    Part("operators", "Operators", 2, operators.measure, operators.section),
    Part("check", "Layouts against the unsplit model", 8, checks.measure, checks.section),
    Part("links", "Messages between GPUs", 2, links.measure, links.section),
    Part("faults", "Killed and frozen ranks", 4, faults.measure, faults.section),
    Part("profile", "Kernels of a training step", 2, profile.measure, profile.section),
    Part("speed", "Images a second", 8, speed.measure, speed.section),
)


def run_selftest(config: SelftestConfig) -> int:
    """Run the self-test, and return the exit code: 1 if a row failed."""
    names = part_names(config.parts)
    parts = [part for part in PARTS if part.name in names]
    seconds = budget_seconds(config.budget)
    folder = make_output_folder(config.out, (PAGE, JSON))
    try:
        with stoppable():
            result = _run(parts, config, seconds, folder)
    except Stopped:
        sys.exit(INTERRUPTED)
    print(f"\n{one_line(summary(result))}\n{one_line(f'{folder}/{PAGE}, {JSON}')}")
    return DIFFERS if result.failures else DONE


def _run(parts: Sequence[Part], config: SelftestConfig, seconds: float, folder: Path) -> Result:
    begin, budget = time.monotonic(), Budget(PARTS_SHARE * seconds)
    try:
        machine = call(look_at_machine, config.device, seconds=LOOK_SECONDS)
    except (OutOfTime, WorkerError) as error:
        raise InputError(
            f"--device {config.device}: a process that only looked for it failed ({error}); see "
            "whether nvidia-smi can talk to the GPUs, or choose --device cpu"
        ) from error
    facts = {
        "command": this_command(),
        "date": time.strftime("%Y-%m-%d"),
        "warm_up": WARM_UP,
        **provenance(),
    }
    print(one_line(f"{machine.hardware}; at most {seconds:.0f} s"))
    results: list[PartResult] = []
    result = Result(machine, facts, results, seconds, 0.0)
    for index, part in enumerate(parts):
        start = time.monotonic()
        fraction = part.weight / sum(later.weight for later in parts[index:])
        rows = list(guarded(part, part.measure(machine, budget.part(fraction))))
        results.append(PartResult(part, rows, time.monotonic() - start))
        print(one_line(f"{part.name}: {counts(rows)} ({results[-1].seconds:.0f} s)"), flush=True)
        result = Result(machine, facts, results, seconds, time.monotonic() - begin)
        write_atomically(folder / JSON, as_json(result))
        write_atomically(folder / PAGE, page(result))
    return result


def guarded(part: Part, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows of a part; an error that ends it becomes its last row."""
    try:
        yield from rows
    except Exception as error:
        yield failed(part.name, error)
