"""Make the lines that say whether more or fewer replicas would pay (`replication.scaling`)."""

from collections.abc import Iterator
from itertools import chain, takewhile
from statistics import fmean

from vigpipe.messages import plural
from vigpipe.replication.scaling import Advice, Reading, published, safer, sentences
from vigpipe.report.curves import partial_batches
from vigpipe.report.fields import LARGEST
from vigpipe.report.markup import paragraph
from vigpipe.report.read import ReportedRun, StepMetrics

_MOST_REPLICAS = 10**6  # a file may say anything, and more are not believed


def readings(run: ReportedRun) -> list[Reading]:
    """Return the throughput of each step of a run, of all replicas together.

    Left out are the first step after each start, which warms up, and partial batches. Where
    replicas take steps of their own, they remain as many, a step is its D items, whoever took them,
    and its throughput their samples over the mean of their seconds, without waits between items.
    """
    now = _num_replicas(run)
    if now is None:
        return []
    steps = run.steps if run.replicas is None else _joined(run, now)
    left_out = partial_batches(steps)
    starts = [0, *(resumption.after_step for resumption in run.resumptions)]
    left_out |= {
        next((i for i, step in enumerate(steps) if step.number > start), -1) for start in starts
    }
    told = [
        (resumption.after_step, number)
        for resumption in run.resumptions
        if run.replicas is None and (number := _believed(resumption.replicas_before))
    ]
    return [
        Reading(
            next((number for last, number in told if step.number <= last), now), step.per_second
        )
        for i, step in enumerate(steps)
        if i not in left_out and 0 <= step.per_second < LARGEST
    ]


def scaling_section(run: ReportedRun) -> Iterator[str]:
    """Make the HTML about more or fewer replicas; nothing for a run that always had one."""
    history = readings(run)
    prediction = None if run.replicas is None else run.replicas.prediction
    if prediction is None and not any(reading.num_replicas > 1 for reading in history):
        return
    if prediction is not None:
        yield paragraph(" ".join(sentences(prediction)))
        yield paragraph(
            "Predicted from the seconds of the replicas, if items take as long as now, which needs "
            "cores or GPUs for one more.",
            "note",
        )
    if history:
        now = history[-1].num_replicas
        latest = list(takewhile(lambda reading: reading.num_replicas == now, reversed(history)))
        same = [reading.per_second for reading in reversed(latest)]
        yield paragraph(_told("Published rule", published(same, now), now))
        yield paragraph(_told("Safer rule", safer(history), now))
        yield paragraph(
            "A reading is the throughput of a step, without the first of each start and partial "
            "batches. The published rule takes a flat curve for a reason to add a replica, "
            "which it is not; the safer one looks whether a change has paid.",
            "note",
        )
    how = "go on from its checkpoint" if run.replicas is None else "start another run"
    yield paragraph(
        f"A run never changes its number of replicas by itself: {how} with another --dp.", "note"
    )


def _told(rule: str, advice: Advice, now: int) -> str:
    change = "" if advice.num_replicas == now else f" instead of {now}"
    return f"{rule}: {plural(advice.num_replicas, 'replica')}{change}. {advice.why}"


def _num_replicas(run: ReportedRun) -> int | None:
    if run.replicas is not None:
        return _believed(run.replicas.num_replicas)
    if "layout" in run.summary:
        return _believed(run.summary.object("layout").whole("replicas"))
    return _believed(run.options.get("dp"))


def _believed(number: object) -> int | None:
    return number if isinstance(number, int) and 1 <= number <= _MOST_REPLICAS else None


def _joined(run: ReportedRun, num_replicas: int) -> list[StepMetrics]:
    """Join the items of each step into one step; leave out steps of which an item is missing."""
    items: dict[int, list[StepMetrics]] = {}
    for step in chain(run.steps, *run.steps_of_others.values()):
        items.setdefault(step.number, []).append(step)
    joined: list[StepMetrics] = []
    for _, own in sorted(items.items()):
        seconds = fmean(step.seconds for step in own)
        if len(own) == num_replicas and seconds > 0:
            processed = sum(step.num_processed for step in own)
            nodes = [step.training_nodes for step in own if step.training_nodes is not None]
            joined.append(
                own[0]._replace(
                    seconds=seconds,
                    per_second=processed / seconds,
                    training_nodes=sum(nodes) if nodes else None,
                )
            )
    return joined
