"""Make one HTML page from runs, which opens from disk and needs no network."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vigpipe.files.atomic import write_atomically
from vigpipe.files.outputs import check_new_file, told_if_unwritable
from vigpipe.job.score import SHARES, name_of
from vigpipe.report import curves
from vigpipe.report.charts import as_html
from vigpipe.report.comparison import Line, differences, progress, ratios, run_table
from vigpipe.report.markup import escape, paragraph, table
from vigpipe.report.read import Evaluation, ReportedRun, read_runs
from vigpipe.report.replicas import replica_section
from vigpipe.report.scaling import scaling_section
from vigpipe.report.style import document
from vigpipe.report.terms import explain
from vigpipe.report.times import has_times, time_sections

MARK = '<meta name="generator" content="vigpipe report">'
_HOW_TO_ZOOM = (
    "Drag over a chart to zoom, double-click to come back; a name in the legend hides it."
)


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write the page about one or several runs, over an earlier page but no other file."""
    check_new_file(out, "--out ", (".html", ".htm"), mark=MARK, overwrite=None)
    text = page(read_runs(runs))
    with told_if_unwritable(f"--out {out}", "choose another file"):
        write_atomically(out, text)


def page(runs: Sequence[ReportedRun]) -> str:
    """Make the HTML of the page about these runs."""
    names = ", ".join(run.name for run in runs)
    title = f"vigpipe report: {names if len(runs) <= 3 else f'{len(runs)} runs'}"
    body = "\n".join([*_overview(runs), *_courses(runs), *_replicas(runs), *_times(runs)])
    return document(MARK, title, body, f". {_HOW_TO_ZOOM}")


def _overview(runs: Sequence[ReportedRun]) -> Iterator[str]:
    yield "<h2>Runs</h2>"
    for run in runs:
        if run.running:
            yield paragraph(f"{run.name} is still running: {progress(run)}.", "running")
        if run.unfinished:
            yield paragraph(f"{run.name} has not finished: {run.unfinished}.", "warning")
    yield _by_run(runs, run_table(runs))
    mains = [name_of(SHARES[unit][0]) for unit in _units(runs)]
    yield explain("rank", "stage", "replica", "micro-batch", "schedule", *mains)
    yield paragraph(
        "Medians are over the steps after the warm-up of a timed run, and over all but the first "
        "of another one; steps with a partial batch, at the end of an epoch, are left out if there "
        "are others.",
        "note",
    )
    yield from _without_times(runs)
    if len(runs) > 1:
        yield "<h2>Comparison</h2>"
        medians = ratios(runs)
        if medians:
            yield paragraph(f"Medians of training, and their ratio to those of {runs[0].name}.")
            yield _by_run(runs, medians)
        differ = differences(runs)
        yield "<h3>Options that differ</h3>" if differ else paragraph("All options are the same.")
        if differ:
            yield _by_run(runs, differ)


def _without_times(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Say which runs have no section about their time, in one sentence for each reason."""
    without = [run for run in runs if not has_times(run)]
    later = [run.name for run in without if run.running and run.options.get("timing")]
    never = [run.name for run in without if run.name not in later]
    what = "no bubble, no timeline and no tables of stages and blocks"
    if later:
        yield paragraph(f"There is {what} of {', '.join(later)} until the run ends.", "note")
    if never:
        why = "was not timed" if len(never) == 1 else "were not timed"
        yield paragraph(
            f"{', '.join(never)} {why}: there is {what}, which vigpipe train --timing records.",
            "note",
        )


def _by_run(runs: Sequence[ReportedRun], lines: Sequence[Line]) -> str:
    rows = [[name, *cells] for name, cells in lines]
    return table(["", *(run.name for run in runs)], rows, style="runs")


def _courses(runs: Sequence[ReportedRun]) -> Iterator[str]:
    evaluations = [row for run in runs for row in run.evaluations]
    has_validation = any(row.validation is not None for row in evaluations)
    units = _units(runs)
    samples = " or ".join(units)
    strategies = [(run.name, run.replicas) for run in runs if run.replicas is not None]
    own_steps = [name for name, replicas in strategies if not replicas.has_server]
    served = [name for name, replicas in strategies if replicas.has_server]
    if served:
        yield paragraph(
            f"A server applied the gradients of replicas in {', '.join(served)}. Accuracy and "
            "learning rate are the server's, loss and throughput those of replica 0. Faint: the "
            "training loss of the other replicas.",
            "note",
        )
    if own_steps:
        yield paragraph(
            f"Replicas took steps of their own in {', '.join(own_steps)}. Loss, accuracy, learning "
            "rate and throughput are those of replica 0, until the end, when one is made of all. "
            "Faint: the training loss of the other replicas.",
            "note",
        )
    if any(run.steps for run in runs):
        yield "<h2>Loss</h2>"
        validation = f"; dashes and dots: of the validation {samples}" if has_validation else ""
        yield paragraph(
            "Solid: of every training batch, where a smaller last batch of an epoch is joined with "
            f"the one before it; dashed: the mean of an epoch's training {samples}; dotted: of the "
            f"test {samples}{validation}."
        )
        epochs = [{"images": "epoch", "nodes": "epoch of a graph"}[unit] for unit in units]
        validated = dict.fromkeys(row.unit for row in evaluations if row.validation is not None)
        yield explain("step", *epochs, *(f"validation {unit[:-1]}" for unit in validated))
        yield as_html(curves.loss_chart(runs), "loss")
    if evaluations:
        yield "<h2>Accuracy</h2>"
        names: list[str] = []
        for unit in dict.fromkeys(row.unit for row in evaluations):
            told = {name for run in runs for name in run.told_shares}
            shares = [name for name in SHARES[unit] if name in told]
            of_unit = [row for row in evaluations if row.unit == unit]
            yield paragraph(_lines_of_scores(of_unit, shares))
            names += map(name_of, shares)
        has_average = any(row.test.average is not None for row in evaluations)
        yield explain(*names, *(["moving average"] if has_average else []))
        yield as_html(curves.accuracy_chart(runs), "accuracy")
    if any(run.steps for run in runs):
        yield "<h2>Learning rate</h2>"
        yield as_html(curves.learning_rate_chart(runs), "learning-rate")
        yield "<h2>Throughput</h2>"
        yield paragraph(
            f"{samples.capitalize()} a second; evaluations are not counted, and partial "
            "batches left out."
        )
        yield as_html(curves.throughput_chart(runs), "throughput")


def _units(runs: Sequence[ReportedRun]) -> list[str]:
    return list(dict.fromkeys(run.unit for run in runs))


def _lines_of_scores(evaluations: Sequence[Evaluation], shares: Sequence[str]) -> str:
    """Explain the lines of the chart of scores in a sentence, of runs that score the same."""
    unit, (main, *_) = evaluations[0].unit, map(name_of, shares)
    dashes = {"dot": "dotted", "longdash": "long dashes"}
    rest = "".join(f"; {dashes[curves.OTHER_DASHES[n]]}: {name_of(n)}" for n in shares[1:])
    has_average = any(row.test.average is not None for row in evaluations)
    has_validation = any(row.validation is not None for row in evaluations)
    average = f"; dashed: {main} of the weights' moving average" if has_average else ""
    validation = f"; dashes and dots: {main} of the validation {unit}" if has_validation else ""
    if has_average and has_validation:
        validation += ", with long dashes of the moving average"
    return f"Solid: {main} of the test {unit}{rest}{average}{validation}."


def _replicas(runs: Sequence[ReportedRun]) -> Iterator[str]:
    for index, run in enumerate(runs):
        own = [] if run.replicas is None else [*replica_section(run.replicas, index, run.unit)]
        scaling = [*scaling_section(run)]
        if own or scaling:
            yield f"<h2>Replicas of {escape(run.name)}</h2>"
        yield from own
        if own and scaling:
            yield "<h3>More replicas or fewer?</h3>"
        yield from scaling


def _times(runs: Sequence[ReportedRun]) -> Iterator[str]:
    for index, run in enumerate(runs):
        if run.timing is not None and has_times(run):
            yield f"<h2>Time of {escape(run.name)}</h2>"
            yield from time_sections(run.timing, index, run.unit)
