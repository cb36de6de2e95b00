"""Does `vigpipe check` hold on this machine, on one device and in every layout that fits?"""

import re
from collections.abc import Iterator, Sequence
from functools import partial

from vigpipe.errors import DIFFERS, DONE
from vigpipe.report.markup import paragraph
from vigpipe.selftest.command import Finished, run_command
from vigpipe.selftest.machine import Machine
from vigpipe.selftest.rows import Budget, Row, attempt
from vigpipe.selftest.tables import Column, rows_table
from vigpipe.selftest.worker import last_line

MOST_SECONDS = 150.0
_LINE = re.compile(
    r"^(loss|gradients|weights|running statistics) +(\S+) +(\S+) +(yes|no)", re.MULTILINE
)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def layouts(num_ranks: int, num_blocks: int) -> list[tuple[int, int]]:
    """Return stages and replicas of so many ranks, where stages have at least one block each."""
    sizes = [s for s in range(1, min(num_ranks, num_blocks) + 1) if num_ranks % s == 0]
    return [(s, num_ranks // s) for s in reversed(sizes)]


def commands(machine: Machine) -> list[tuple[str, list[str]]]:
    """Return the checks of this machine: what each is of, and the words after `vigpipe check`."""
    if machine.device == "cpu":
        small, num_blocks = ["--model", "vig_digits", "--threads", "1"], 4
        batch, worlds, pyramid = "48", [2, 4], []
    else:
        small, num_blocks = ["--model", "vig_cifar_ti", "--data", "fake", "--image-size", "32"], 8
        batch, num_gpus = "64", len(machine.gpus)
        worlds = sorted({n for n in (2, 4, 8) if n <= num_gpus} | ({num_gpus} - {1}))
        pyramid = ["--model", "pvig_cifar_ti", "--data", "fake", "--image-size", "32"]
    single = ["--batch-size", batch]
    double = ["--compare-steps", "2", "--batch-size", batch, "--dtype", "float64"]
    parts = ["--virtual-stages", "2", "--schedule", "loopedbfs", "--microbatches", "4"]
    of_parts = f"one rank {' '.join(parts)}"
    alone = (["--microbatches", "4"], parts, [*parts, "--recompute", "always"])
    found = [(f"one rank {' '.join(words)}, float32", [*small, *words, *single]) for words in alone]
    found += [(f"{of_parts}, float64", [*small, *parts, *double])]
    if pyramid:
        found += [(f"{of_parts}, pyramid, float32", [*pyramid, *parts, *single])]
    for stages, replicas in (pair for n in worlds for pair in layouts(n, num_blocks)):
        what = f"{_count(stages, 'stage')} × {_count(replicas, 'replica')}, float64"
        words = ["--stages", str(stages), "--dp", str(replicas), "--microbatches", "2"]
        found += [(what, [*small, *words, *double])]
    return [(what, [*words, "--device", machine.device]) for what, words in found]


def measure(machine: Machine, budget: Budget) -> Iterator[Row]:
    """Run `vigpipe check` in every layout, each as a command of its own."""
    about = 12.0 if machine.device == "cpu" else 20.0
    for what, words in commands(machine):
        yield from attempt(what, budget, about, MOST_SECONDS, partial(_check, what, words))
    if machine.device != "cpu" and len(machine.gpus) < 2:
        yield Row("layouts of several ranks", "skipped", note="they need a second GPU")


def _check(what: str, words: Sequence[str], seconds: float) -> list[Row]:
    return [read(what, words, run_command(["check", *words], seconds))]


def read(what: str, words: Sequence[str], done: Finished) -> Row:
    """Make a row from what `vigpipe check WORDS` has printed."""
    found = {kind: (relative, same) for kind, _, relative, same in _LINE.findall(done.stdout)}
    values = {
        "command": " ".join(["vigpipe check", *words]),
        "seconds": done.seconds,
        **{kind: float(relative) for kind, (relative, _) in found.items()},
    }
    if found:
        values["identical"] = all(same == "yes" for _, same in found.values())
    if done.code == DONE:
        return Row(what, "passed", values)
    if done.code == DIFFERS and found:
        return Row(what, "failed", values, "differs from the unsplit model by more than is allowed")
    return Row(what, "failed", values, f"exit code {done.code}: {last_line(done.stderr)}")


def section(rows: Sequence[Row]) -> Iterator[str]:
    """Show the largest relative differences from the unsplit model, layout by layout."""
    yield paragraph(
        "Against the unsplit model on one rank, on the same micro-batches: the largest relative "
        "difference. One rank's parts have its bits; several replicas add up in another order.",
        "note",
    )
    columns = (
        Column("loss", "loss", "{:.1e}"),
        Column("gradients", "gradients", "{:.1e}"),
        Column("weights", "weights", "{:.1e}"),
        Column("statistics", "running statistics", "{:.1e}"),
        Column("bit for bit", "identical", lambda same: "yes" if same else "no"),
        Column("seconds", "seconds", "{:.1f}"),
    )
    yield rows_table("layout", rows, columns)
