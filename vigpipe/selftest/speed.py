"""How many images a second, in every way that a user could choose, and with how much memory?

Every way has a process of its own, and all of a model take turns, so that a machine that gets
slower slows down all of them. A process gives its unused memory back after its turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from time import monotonic
from typing import Any

import torch

from vigpipe.config.choices import Model
from vigpipe.report.charts import as_html, styled
from vigpipe.report.markup import paragraph, size
from vigpipe.selftest.compared import relative_difference
from vigpipe.selftest.machine import Machine
from vigpipe.selftest.rows import Budget, Row
from vigpipe.selftest.tables import Column, rows_table
from vigpipe.selftest.turns import Entry, GivenUp, best_reference, ratios, take_turns
from vigpipe.selftest.way import Contender, Formulation, Mode, Precision, Way
from vigpipe.selftest.worker import OutOfTime, Worker, WorkerError

MODES: tuple[Mode, ...] = ("training", "inference")
EAGER_AMP = Way("reference", False, "bfloat16")  # what the ratios are to
MOST_REPEATS = 5
MOST_AT_ONCE = 8  # processes that are prepared, and share the memory of a GPU
ABOUT_EAGER_SECONDS, ABOUT_COMPILE_SECONDS, MOST_PREPARE_SECONDS = 10.0, 60.0, 240.0
ABOUT_TURN_SECONDS = 2.0  # a way's; the budget keeps them for all ways that will be prepared
BATCH_SIZES = ((70e9, 128), (30e9, 64), (14e9, 32), (0.0, 16))  # least bytes of the GPU, images
CPU_BATCH_SIZE = 16


def models(machine: Machine) -> dict[Model, list[Way]]:
    """Return the models to time, the most wanted first, and the ways of each, likewise."""
    if machine.device == "cpu":
        eager = [Way(f, False, p) for p in ("float32", "bfloat16") for f in ("reference", "ours")]
        return {"vig_cifar_ti": [*eager, *(Way(f, True, "float32") for f in ("reference", "ours"))]}
    formulations: tuple[Formulation, ...] = "reference", "ours"
    precisions: tuple[Precision, ...] = "bfloat16", "tf32", "float32"
    ways: list[Way] = []
    for precision in precisions:
        ways += [Way(formulation, False, precision) for formulation in formulations]
        ways += [Way("ours", False, precision, graph=True)]
        if precision != "float32":  # nobody compiles and leaves TF32 out
            for graph in (True, False):
                ways += [Way(formulation, True, precision, graph) for formulation in formulations]
    amp = [way for way in ways if way.precision == "bfloat16"]
    return {"vig_ti_224": ways, "vig_s_224": amp, "pvig_s_224": amp}


def measure(machine: Machine, budget: Budget) -> Iterator[Row]:
    """Time the models in turn, as far as the budget goes."""
    for model, ways in models(machine).items():
        yield from _measure_model(model, ways, batch_size_of(machine), machine, budget)


def entries_of(ways: Sequence[Way]) -> list[Entry]:
    """Return the ways in every mode that they are for, those that take no compiling first."""
    entries = [
        Entry(way, mode)
        for mode in MODES
        for way in ways
        if mode == "training" or way.compiled or not way.graph
    ]
    return sorted(entries, key=lambda e: (e.way.compiled, e.way.precision != "bfloat16"))


def batch_size_of(machine: Machine) -> int:
    """Return the images of a step that fit into the memory of this machine's first GPU."""
    if not machine.gpus:
        return CPU_BATCH_SIZE
    memory = machine.gpus[0].memory_bytes
    return next(batch_size for least, batch_size in BATCH_SIZES if memory >= least)


def _measure_model(
    model: Model, ways: Sequence[Way], batch_size: int, machine: Machine, budget: Budget
) -> Iterator[Row]:
    # Several are prepared at once, because nothing is timed meanwhile.
    at_once = min(MOST_AT_ONCE, max(1, machine.num_threads // 2))
    compilers = max(1, machine.num_threads // at_once)
    entries = entries_of(ways)
    turns_seconds = ABOUT_TURN_SECONDS * len(entries)
    try:
        for start in range(0, len(entries), at_once):
            group = entries[start : start + at_once]
            chosen = [entry for entry in group if _has_time(entry, budget, turns_seconds)]
            for entry in chosen:
                shape = (model, entry.way, entry.mode, batch_size, machine.device)
                entry.worker = Worker(Contender, *shape, machine.num_threads, compilers)
            _prepare(chosen, budget, turns_seconds)
        for mode in MODES:
            _take_turns([entry for entry in entries if entry.mode == mode], budget)
    finally:
        for entry in entries:
            entry.end()
    for mode in MODES:
        yield from rows_of(model, batch_size, [e for e in entries if e.mode == mode])


def _has_time(entry: Entry, budget: Budget, turns_seconds: float) -> bool:
    about = ABOUT_COMPILE_SECONDS if entry.way.compiled else ABOUT_EAGER_SECONDS
    if budget.left < about + turns_seconds:
        entry.give_up("skipped", f"not begun: {budget.left:.0f} s were left")
    return entry.outcome == "measured"


def _prepare(entries: Sequence[Entry], budget: Budget, turns_seconds: float) -> None:
    """Prepare some ways at once, and those that failed, maybe for want of memory, one by one."""
    for entry in entries:
        assert entry.worker is not None
        entry.worker.send("prepare")
    left = max(1.0, budget.left - turns_seconds)
    late: GivenUp = "failed" if left > MOST_PREPARE_SECONDS else "skipped"
    deadline = monotonic() + min(MOST_PREPARE_SECONDS, left)
    was_alone = len(entries) == 1
    again = [e for e in entries if not _receive(e, deadline, late, is_last_try=was_alone)]
    for entry in again:
        assert entry.worker is not None
        entry.worker.send("prepare")
        _receive(entry, deadline, late, is_last_try=True)


def _receive(entry: Entry, deadline: float, late: GivenUp, *, is_last_try: bool) -> bool:
    """Take the result of `prepare`; False if it failed and can be tried again."""
    assert entry.worker is not None
    try:
        entry.prepared = entry.worker.receive(max(0.1, deadline - monotonic()))
    except OutOfTime:
        entry.give_up(late, "its first steps took too long")
    except WorkerError as error:
        if not is_last_try and not entry.worker.has_ended:
            return False
        entry.give_up("failed", str(error))
    return True


def _take_turns(entries: Sequence[Entry], budget: Budget) -> None:
    """Let the prepared ways run in turn, for as many rounds as there is time for."""
    before = budget.left

    def has_time() -> bool:
        nonlocal before
        seconds, before = before - budget.left, budget.left
        return before >= 1.5 * seconds

    take_turns(entries, MOST_REPEATS, has_time)
    for entry in entries:
        entry.end()


def rows_of(model: str, batch_size: int, entries: Sequence[Entry]) -> Iterator[Row]:
    """Make the rows of one model in training or in inference."""
    timed = [entry for entry in entries if entry.outcome == "measured" and entry.seconds]
    seconds = {entry.way: entry.seconds for entry in timed}
    best = best_reference(seconds)
    exact_ways = (Way("reference", False, "float32"), EAGER_AMP)
    exact = next((e.prepared for way in exact_ways for e in timed if e.way == way), None)
    for entry in entries:
        what = f"{model}, {entry.mode}: {entry.way}"
        values: dict[str, Any] = {
            "model": model,
            "mode": entry.mode,
            "formulation": entry.way.formulation,
            "compiled": entry.way.compiled,
            "graph": entry.way.graph,
            "precision": entry.way.precision,
            "batch_size": batch_size,
        }
        if entry not in timed or entry.prepared is None:
            yield Row(what, entry.outcome, values, entry.note)
            continue
        values |= {
            "seconds": entry.seconds,
            "images_per_second": batch_size / median(entry.seconds),
            "first_seconds": entry.prepared.first_seconds,
            "peak_bytes": entry.prepared.peak_bytes,
            "to_eager_amp": _ratio(seconds, EAGER_AMP, entry.way),
            "to_best_reference": _ratio(seconds, best, entry.way),
            "is_best_reference": entry.way == best,
        }
        if exact is not None and exact.logits and entry.prepared.logits:
            logits, expected = torch.tensor(entry.prepared.logits), torch.tensor(exact.logits)
            values["logits_off_by"] = relative_difference(logits, expected)
        yield Row(what, "measured", values)


def _ratio(
    seconds: Mapping[Way, list[float]], reference: Way | None, way: Way
) -> dict[str, float] | None:
    if reference is None or reference not in seconds:
        return None
    found = ratios(seconds, reference, way)
    return {"median": median(found), "least": min(found), "most": max(found)}


def section(rows: Sequence[Row]) -> Iterator[str]:
    """Draw and show the images a second of every model."""
    yield paragraph(
        "The reference is the formulation that everyone uses (selftest/reference.py); eager "
        "AMP is how it is usually trained. Training: a step of vigpipe train, or forward, backward "
        "and AdamW of the reference, on one batch that stays in memory. Inference: evaluation "
        "mode, norms folded into the weights where they are ours. Ratios are taken turn by turn. "
        "Logits are compared with those of the reference in float32, or with eager AMP where it "
        "does not run; near-ties of neighbours that fall the other way show there."
    )
    groups: dict[tuple[str, str], list[Row]] = {}
    others = [row for row in rows if "model" not in row.values]  # an error that ended this part
    for row in rows:
        if "model" in row.values:
            groups.setdefault((row.values["model"], row.values["mode"]), []).append(row)
    columns = (
        Column("images/s", "images_per_second", "{:,.1f}"),
        Column("× eager AMP", "to_eager_amp", _spread),
        Column("× best reference", "to_best_reference", _spread),
        Column("memory", "peak_bytes", size),
        Column("first step, s", "first_seconds", "{:.1f}"),
        Column("logits off by", "logits_off_by", "{:.0e}"),
        Column("turns", "seconds", lambda seconds: str(len(seconds))),
    )
    for number, ((model, mode), group) in enumerate(groups.items()):
        batch_size = group[0].values["batch_size"]
        yield f"<h3>{model}, {mode}, batches of {batch_size}</h3>"
        if any(row.outcome == "measured" for row in group):
            yield as_html(_chart(group), f"speed-{number}")
        yield rows_table("way", [_short(row) for row in group], columns)
    if others:
        yield rows_table("model", others, ())


def _short(row: Row) -> Row:
    """Leave out what the heading says."""
    best = " (the best reference)" if row.values.get("is_best_reference") else ""
    return Row(row.what.split(": ")[1] + best, row.outcome, row.values, row.note)


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} – {ratio['most']:.2f})"


def _chart(rows: Sequence[Row]) -> Any:
    from plotly.graph_objects import Figure

    figure = Figure()
    chosen = [row for row in rows if row.outcome == "measured"]
    for formulation, colour in (("reference", "#9aa4af"), ("ours", "#0072b2")):
        bars = [row for row in chosen if row.values["formulation"] == formulation]
        rates = [row.values["images_per_second"] for row in bars]
        names = [row.what.split(": ")[1] for row in bars]
        figure.add_bar(
            name=formulation,
            orientation="h",
            y=names,
            x=rates,
            text=[f"{rate:,.0f}" for rate in rates],
            textposition="outside",
            cliponaxis=False,
            marker={"color": colour},
            hovertemplate="%{y}: %{x:,.1f} images/s<extra></extra>",
        )
    order = [row.what.split(": ")[1] for row in chosen]
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order)
    figure.update_xaxes(title_text="images a second", rangemode="tozero")
    return styled(figure, height=130 + 26 * len(chosen))
