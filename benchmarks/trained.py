"""Ask questions that runs of `vigpipe train` answer, and write the answers as a page.

A benchmark of this kind is a `Question`; everything else is the same for all of them.
"""

import csv
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import tomli_w
from tabulate import tabulate

from benchmarks.child import run_child
from vigpipe.config.choices import GRAPH_MODELS
from vigpipe.config.files import as_toml
from vigpipe.config.options import TrainConfig, as_given, flag
from vigpipe.errors import DONE, INTERRUPTED, InputError
from vigpipe.launch.child import stoppable
from vigpipe.launch.signals import Stopped
from vigpipe.replication.metrics import accounted_seconds
from vigpipe.run.folder import SUMMARY, make_output_folder
from vigpipe.run.follow import step_rows
from vigpipe.run.provenance import format_versions, this_command

Options = TypeVar("Options", bound=TrainConfig)
Found = TypeVar("Found", bound=tuple[Any, ...])  # a NamedTuple: what a run came to

# What pages say of `largest_peak` where some runs have one rank and others several.
PEAK = (
    "Peak memory is that of the largest rank, with the evaluation: on a CPU all resident pages, so "
    "also those of the mapped file that has what the rank stores of the wide model. A lone rank "
    "has read the libraries itself, and all their pages count; several are forks, of which only "
    "those count that they use, some hundred MB less."
)

FILES = ("README.md", "rows.csv", "config.toml", "runs")  # in the folder of such a benchmark
PROGRAM = ("vigpipe",)  # a module, and its arguments before the verb


def check_seeds(seeds: int) -> None:
    """Raise InputError if there are no seeds."""
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: must be at least 1")


def check_left_out(
    options: TrainConfig,
    plain: TrainConfig,
    names: Iterable[str],
    why: str = "differs from run to run",
) -> None:
    """Check that the user has not given options that the benchmark chooses for every run.

    Args:
        options: of the benchmark.
        plain: the same with nothing said.
        names: of these options.
        why: they are not the user's.

    Raises:
        InputError: one of them was given.
    """
    for name in names:
        if (value := getattr(options, name)) != getattr(plain, name):
            raise InputError(f"{as_given(name, value)}: {why} here; leave it out")


def check_graph_model(model: str) -> None:
    """Raise InputError unless a model is one of a graph."""
    if model not in GRAPH_MODELS:
        raise InputError(
            f"--model {model}: is a model of images; choose {' or '.join(GRAPH_MODELS)}"
        )


def parse_numbers(name: str, text: str) -> list[int]:
    """Parse an option that is a list of numbers from 1; InputError if it is something else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() and 1 <= int(word) < 10**9 for word in words):
        raise InputError(f"{flag(name)} {text}: must be numbers from 1 with commas between them")
    return [int(word) for word in words]


def best_evaluation(rows: Iterable[dict[str, Any]], score: str, folder: Path) -> dict[str, Any]:
    """Return the row of the evaluation with the largest validation score.

    An InputError, which names the folder of the run, says that nothing is held out for it.
    """
    evaluations = [row for row in rows if score in row]
    if not all("validation" in row for row in evaluations):
        raise InputError(f"{folder}: the graph has no validation nodes, which choose the epoch")
    return max(evaluations, key=lambda row: row["validation"][score])


def training_seconds(summary: Mapping[str, Any], rows: Iterable[dict[str, Any]]) -> float:
    """Return the seconds for which a run has trained, without evaluations.

    They are those that the slowest replica has worked, waited and averaged, or those of all steps
    where replicas take them together.
    """
    if "replicas" in summary:
        return max(sum(accounted_seconds(replica)) for replica in summary["replicas"]["each"])
    return sum(row["step_seconds"] + row["data_seconds"] for row in step_rows(rows))


def steps_by_replica(rows: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of optimizer steps by replica; 0 if all take every step together."""
    by_replica: dict[int, list[dict[str, Any]]] = {}
    for row in step_rows(rows):
        by_replica.setdefault(row.get("replica", 0), []).append(row)
    return by_replica


def slowest_step(rows: Sequence[dict[str, Any]]) -> float:
    """Return the median duration of a step with its data, in seconds, of the slowest replica."""
    return max(
        median(row["step_seconds"] + row["data_seconds"] for row in own)
        for own in steps_by_replica(rows).values()
    )


def largest_peak(summary: Mapping[str, Any]) -> int:
    """Return the largest memory of a rank, in bytes.

    In RAM these are all resident pages, those of mapped files included.
    """
    each = summary.get("replicas", {}).get("each", ())
    return max([summary["peak_bytes"], *(replica["peak_bytes"] for replica in each)])


def write_shared(folder: Path, options: TrainConfig, others: Iterable[str]) -> None:
    """Write the options of `vigpipe train` that all runs share: those without the `others`."""
    shared = as_toml(options)
    for name in others:
        shared.pop(name, None)
    (folder / "config.toml").write_text(tomli_w.dumps(shared), encoding="utf-8")


class TrainedRun(NamedTuple):
    """A run of `vigpipe train`."""

    name: str  # what tells it from the others, for messages
    folder: str  # its folder, below that of all runs
    options: Mapping[str, object]  # those that differ from run to run
    case: Any = None  # what the question knows it by
    program: Sequence[str] = PROGRAM  # the module that is run, and its arguments before `train`


class Failure(NamedTuple):
    """How a run has failed."""

    code: int
    sentence: str  # the last line that it has written to stderr


@dataclass(frozen=True)
class Question(Generic[Options, Found]):
    """A question that runs of `vigpipe train` with shared options answer; see `ask`."""

    title: str  # of the page
    # Options that differ from run to run, or are not those of `vigpipe train`.
    not_shared: Sequence[str]
    plan: Callable[[Options], Sequence[TrainedRun]]  # checks the options, and returns the runs
    # What a finished run came to, given the options, the run, its folder and its summary.json.
    read: Callable[[Options, TrainedRun, Path, Mapping[str, Any]], Found]
    told: Callable[[Found], str]  # the sentence about it that is printed while others run
    # The question in words, and the tables that answer it. It is given the folder too, where it may
    # leave a picture.
    page: Callable[[Options, Sequence[Found], Path], tuple[str, Sequence["Table"]]]
    files: Sequence[str] = ()  # other files that it writes
    # What a run came to that has failed, given the run, its folder and how; None where that ends
    # the benchmark. If all have failed, it ends in any case.
    failed: Callable[[TrainedRun, Path, Failure], Found] | None = None
    # What is found without runs, after them.
    more: Callable[[Options, Sequence[Found]], Sequence[Found]] = lambda options, found: ()


def ask(question: Question[Options, Found], options: Options) -> None:
    """Do all runs of a question in turn, and write README.md, rows.csv and config.toml.

    A signal ends the run that is under way, and this process. InputError is raised if an option is
    out of range, or a run has failed.
    """
    runs = question.plan(options)
    folder = make_output_folder(options.out, (*FILES, *question.files))
    write_shared(folder, options, question.not_shared)
    found: list[Found] = []
    failures: list[Failure] = []
    try:
        with stoppable():
            for run in runs:
                answer = _answer(question, options, folder, run, failures)
                print(f"{run.name}: {question.told(answer)}", flush=True)
                found.append(answer)
    except Stopped:
        sys.exit(INTERRUPTED)
    if len(failures) == len(runs):
        raise InputError(f"every run has failed, the first one with: {failures[0].sentence}")
    found += question.more(options, found)
    words, tables = question.page(options, found, folder)
    write_page(folder, question.title, words, tables, found)


def _answer(
    question: Question[Options, Found],
    options: Options,
    folder: Path,
    run: TrainedRun,
    failures: list[Failure],
) -> Found:
    """Do a run, and return what it came to; if it has failed and may, note how."""
    out = folder / "runs" / run.folder
    summary = train(folder, out, run) if question.failed is None else try_to_train(folder, out, run)
    if isinstance(summary, Failure):
        assert question.failed is not None
        failures.append(summary)
        return question.failed(run, out, summary)
    return question.read(options, run, out, summary)


def train(folder: Path, out: Path, run: TrainedRun) -> dict[str, Any]:
    """Train once, as a command of its own; return its summary.json, or raise InputError."""
    code = run_child(_command(folder, out, run))
    if code != DONE:
        raise InputError(
            f"the run of {run.name} ended with exit code {code}; see its message above"
        )
    return json.loads((out / SUMMARY).read_text(encoding="utf-8"))


def try_to_train(folder: Path, out: Path, run: TrainedRun) -> dict[str, Any] | Failure:
    """Train once, as `train` does, but return how the run has failed if it has."""
    with tempfile.TemporaryFile() as stderr:
        code = run_child(_command(folder, out, run), stderr=stderr)
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").splitlines()
    if code == DONE:
        return json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    written = [line for line in lines if line.strip()]
    sentence = written[-1].removeprefix("vigpipe: ") if written else ""
    return Failure(code, sentence.replace(tempfile.gettempdir(), "$TMPDIR"))


def _command(folder: Path, out: Path, run: TrainedRun) -> list[str]:
    words = [sys.executable, "-m", *run.program, "train", "--config", str(folder / "config.toml")]
    for option, value in {**run.options, "out": out}.items():
        words += as_given(option, value).split(" ", 1)
    return words


class Table(NamedTuple):
    """A table of the page."""

    title: str  # what stands above it; empty for the first
    headers: Sequence[str]  # of its columns
    rows: Sequence[Sequence[str]]  # cells

    def text(self, fmt: str) -> str:
        """Format it, with its title."""
        table = tabulate(self.rows, self.headers, tablefmt=fmt, disable_numparse=True)
        return f"{self.title}\n\n{table}" if self.title else table


def write_page(
    folder: Path,
    title: str,
    question: str,
    tables: Sequence[Table],
    found: Sequence[Any],
) -> None:
    """Print the tables; write README.md and rows.csv.

    Args:
        folder: of the benchmark.
        title: of the page.
        question: what was asked, and how.
        tables: the answer.
        found: what every run came to, a NamedTuple each, which is a row.
    """
    texts = {fmt: "\n\n".join(table.text(fmt) for table in tables) for fmt in ("simple", "github")}
    print(f"\n{question}\n\n{texts['simple']}\n")
    one = json.loads(next(folder.glob(f"runs/*/{SUMMARY}")).read_text(encoding="utf-8"))
    (folder / "README.md").write_text(
        f"# {title}\n\n{question}\n\n{texts['github']}\n\n"
        f"- command: `{this_command()}`\n- all runs: `vigpipe train --config config.toml`, with "
        "the options of the way and the seed\n"
        f"- commit: {one['commit']}\n- hardware: {one['hardware']}; {one['threads_per_rank']} "
        f"thread(s) a rank\n- versions: {format_versions(one['versions'])}\n",
        encoding="utf-8",
    )
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(found[0]._fields)
        writer.writerows(found)
    print(f"{folder}/README.md, rows.csv")
