"""Compare runs side by side: their facts and results, and by how much they differ."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from vigpipe.job.rows import Fill, members
from vigpipe.job.score import SHARES, name_of
from vigpipe.messages import plural
from vigpipe.report import durations
from vigpipe.report.curves import small_batches
from vigpipe.report.fields import Fields
from vigpipe.report.markup import NOTHING, Cell, Shortened, size
from vigpipe.report.read import ReportedRun, SplitScore, StepMetrics
from vigpipe.timing.tables import slowest

Line = tuple[str, Sequence[Cell]]  # the name of a row, and one cell per run
_NOT_COMPARED = ("out",)
_COMMIT = re.compile(r"([0-9a-f]{10})[0-9a-f]{30,54}(\+?)")  # whole, as Git writes it; + if changed


def settled_steps(run: ReportedRun) -> tuple[StepMetrics, ...]:
    """Return the steps after the warm-up, those of partial batches only if there are no others."""
    partial, settled = _partial_batches(run), _after_warmup(run)
    full = [i for i in settled if i not in partial] or settled
    return tuple(run.steps[i] for i in full)


def _after_warmup(run: ReportedRun) -> range:
    """Return the positions of steps after the warm-up, by default the first; of all if none is."""
    warmup = None if run.timing is None else run.timing.warmup_steps
    return range(1 if warmup is None else warmup, len(run.steps)) or range(len(run.steps))


def _partial_batches(run: ReportedRun) -> dict[int, Fill]:
    """Return how full the partial batches of a run are, by the positions of their steps.

    Runs of earlier versions do not tell it; there, the smaller last batches of images are partial.
    Sub-graphs and the items of replicas with steps of their own always differ, so none is partial.
    """
    told = {i: step.partial for i, step in enumerate(run.steps) if step.partial is not None}
    if told or run.unit != "images" or run.replicas is not None:
        return told
    most = max((step.num_processed for step in run.steps), default=0)
    return {
        i: Fill(round(run.steps[i].num_processed), round(most)) for i in small_batches(run.steps)
    }


def run_table(runs: Sequence[ReportedRun]) -> list[Line]:
    """Make the table of runs: one line per fact that a run tells, such as its accuracy."""
    units = dict.fromkeys(run.unit for run in runs)
    told = {name for run in runs for name in run.told_shares} - {"top5"}
    shares = [name for unit in units for name in SHARES[unit] if name in told]
    lines: list[tuple[str, Callable[[ReportedRun], Cell]]] = [
        ("state", _state),
        ("model", lambda run: _option(run, "model")),
        ("data", lambda run: _text(run, "data", _option(run, "data"))),
        ("graph", _graph),
        ("steps", lambda run: _so_far(run, "steps", "number")),
        ("epochs", lambda run: _so_far(run, "epochs", "epoch")),
        ("training loss", _training_loss),
        *((f"validation {name_of(n)}", partial(_share, "validation", n)) for n in shares),
        *((f"test {name_of(n)}", partial(_share, "test", n)) for n in shares),
        ("layout", _layout),
        ("batch", lambda run: _option(run, "batch_size")),
        ("hardware", lambda run: _text(run, "hardware")),
        ("threads a rank", lambda run: _whole(run.summary, "threads_per_rank")),
        *((f"{unit}/s, median", partial(_throughput, unit)) for unit in units),
        ("step, median", lambda run: _settled(run, "seconds", "{:.4f} s")),
        ("step with a partial batch, median", _partial_step),
        ("waiting for data a step, median", lambda run: _settled(run, "data_seconds", "{:.4f} s")),
        ("peak memory", _peak),
        ("commit", _commit),
        ("host", lambda run: _text(run, "host")),
        ("versions", _versions),
    ]
    table = [(name, [value(run) for run in runs]) for name, value in lines]
    return [(name, cells) for name, cells in table if any(cell != NOTHING for cell in cells)]


def differences(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """List the options that are not the same in all runs, one line per option."""
    names = dict.fromkeys(name for run in runs for name in run.options if name not in _NOT_COMPARED)
    lines = [(name, [_option(run, name) for run in runs]) for name in names]
    return [(name, cells) for name, cells in lines if len(set(cells)) > 1]


def ratios(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """List the medians of all runs, with their ratios to those of the first run in brackets."""
    medians = [_medians(run) for run in runs]
    names = dict.fromkeys(name for of_run in medians for name in of_run)
    lines: list[tuple[str, list[str]]] = []
    for name in names:
        values = [of_run.get(name) for of_run in medians]
        first, form = values[0], "{:,.1f}" if name.endswith("/s") else "{:,.3f}"
        cells = [NOTHING if value is None else form.format(value) for value in values]
        for i, value in enumerate(values[1:], 1):
            if first and value is not None:
                cells[i] += f" ({value / first:.2f}×)"
        lines.append((name, cells))
    return lines


def _medians(run: ReportedRun) -> dict[str, float]:
    steps = settled_steps(run)
    values = {}
    if steps:
        values[f"{run.unit}/s"] = median(step.per_second for step in steps)
        values["step, ms"] = 1e3 * median(step.seconds for step in steps)
    if run.timing is not None:
        timed = durations.medians(slowest(run.timing.rows, "train"))
        values |= {f"{name}, ms": 1e3 * v for name, v in timed.items() if name != "step"}
    return values


def progress(run: ReportedRun) -> str:
    """Say how far a run has come, in words for a sentence."""
    if not run.steps:
        return "it has not made its first step"
    steps, epochs = _so_far(run, "steps", "number"), _so_far(run, "epochs", "epoch")
    return f"step {steps} is done, of epoch {epochs}"


def _state(run: ReportedRun) -> str:
    if run.running:
        return "running"
    return "unfinished" if run.unfinished else "finished"


def _so_far(run: ReportedRun, option: str, of_step: str) -> str:
    """Write how many steps or epochs a run has made and, where an option says it, of how many."""
    of_replicas = [steps for steps in (run.steps, *run.steps_of_others.values()) if steps]
    done = str(max((getattr(steps[-1], of_step) for steps in of_replicas), default=0))
    # --steps overrides --epochs.
    is_planned = option in run.options and (option == "steps" or "steps" not in run.options)
    return f"{done} of {run.options[option]}" if is_planned else done


def _training_loss(run: ReportedRun) -> str:
    """Write the mean of the last epoch that was evaluated; the last batch may have few samples."""
    if run.evaluations and run.evaluations[-1].training_loss is not None:
        last = run.evaluations[-1]
        return f"{last.training_loss:.4f}, mean of epoch {last.epoch}"
    return f"{run.steps[-1].loss:.4f}, step {run.steps[-1].number}" if run.steps else NOTHING


def _option(run: ReportedRun, name: str) -> str:
    return str(run.options[name]) if name in run.options else NOTHING


def _text(run: ReportedRun, name: str, otherwise: str = NOTHING) -> str:
    return run.summary.text(name) if name in run.summary else otherwise


def _whole(fields: Fields, name: str) -> str:
    return str(fields.whole(name)) if name in fields else NOTHING


def _layout(run: ReportedRun) -> str:
    if "layout" in run.summary:
        layout = run.summary.object("layout")
        num_stages, schedule = len(layout.items("stages")), layout.text("schedule")
        numbers = layout.whole("replicas"), num_stages, layout.whole("microbatches")
    else:
        numbers = tuple(run.options.get(name, NOTHING) for name in ("dp", "stages", "microbatches"))
        schedule = _option(run, "schedule")
    nouns = ("replica", "stage", "micro-batch")
    replicas, stages, microbatches = (
        # A plan's name may stand for the stages.
        plural(number, noun) if isinstance(number, int) else f"{number} {noun}s"
        for number, noun in zip(numbers, nouns, strict=True)
    )
    return f"{replicas} × {stages}, {microbatches}, {schedule}"


def _share(split: str, name: str, run: ReportedRun) -> str:
    """Write a share of the last evaluation; the main one with that of the moving average."""
    score: SplitScore | None = getattr(run.evaluations[-1], split) if run.evaluations else None
    if score is None or name not in score.shares:
        return NOTHING
    has_average = score.average is not None and name == next(iter(score.shares))
    average = f", moving average {score.average:.2%}" if has_average else ""
    return f"{score.shares[name]:.2%}{average}"


def _graph(run: ReportedRun) -> str:
    if "graph" not in run.summary:
        return NOTHING
    graph = run.summary.object("graph")
    return f"{graph.whole('nodes'):,} nodes, {graph.whole('edges'):,} edges"


def _throughput(unit: str, run: ReportedRun) -> str:
    return _settled(run, "per_second", "{:,.1f}") if run.unit == unit else NOTHING


def _settled(run: ReportedRun, name: str, form: str) -> str:
    values = [getattr(step, name) for step in settled_steps(run)]
    known = [value for value in values if value is not None]
    whose = ", replica 0" if run.replicas is not None else ""
    return f"{form.format(median(known))}{whose}" if known else NOTHING


def _partial_step(run: ReportedRun) -> str:
    """Write the median step of each kind of partial batch, after the warm-up."""
    seconds: dict[Fill, list[float]] = {}
    partial = _partial_batches(run)
    for i in _after_warmup(run):
        if i in partial:
            seconds.setdefault(partial[i], []).append(run.steps[i].seconds)
    what, whose = members(run.unit), ", replica 0" if run.replicas is not None else ""
    cells = [
        f"{median(of_fill):.4f} s of {fill.samples:,} of {fill.full_batch:,} {what}{whose}"
        for fill, of_fill in sorted(seconds.items(), reverse=True)
    ]
    return "; ".join(cells) or NOTHING


def _peak(run: ReportedRun) -> str:
    if run.timing is not None and run.timing.peak_bytes:
        peaks = run.timing.peak_bytes
        return f"{size(max(peaks))}, most of {len(peaks)} ranks"
    if "peak_bytes" in run.summary:
        return f"{size(run.summary.number('peak_bytes'))}, of the last rank"
    return NOTHING


def _commit(run: ReportedRun) -> Cell:
    whole = _text(run, "commit")
    commit = _COMMIT.fullmatch(whole)
    return Shortened(commit[1] + commit[2], whole) if commit else whole


def _versions(run: ReportedRun) -> str:
    if "versions" not in run.summary:
        return NOTHING
    versions = run.summary.object("versions")
    return ", ".join(f"{name} {versions.text(name)}" for name in versions.names())
