"""Benchmark training and inference of a ViG against the best that its users could pick instead."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from typing import cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.alone import MB, set_up, write_page
from benchmarks.options import VigBench
from benchmarks.products import Products
from benchmarks.side_by_side import alternate
from vigpipe.config.choices import MODELS, parse_names
from vigpipe.messages import tell
from vigpipe.model.shapes import VIG_SHAPES
from vigpipe.selftest.compared import relative_difference
from vigpipe.selftest.turns import Entry, best_reference, ratios, take_turns
from vigpipe.selftest.way import NUM_WARMUP, Contender, Mode, Precision, Way, make_model
from vigpipe.selftest.worker import OutOfTime, Worker, WorkerError

SIDES = {"cuda": 8192, "cpu": 2048}  # of the square matrices whose product shows a device's peak
PREPARE_SECONDS = 900.0  # at most, of a way; compiling takes most of it
QUALIFYING, FINALISTS = 3, 2  # rounds of all ways, and of the reference's those that go on then
# Turns whose ratios spread more are no measurement: the span of their middle half, by their median.
WIDEST = 0.2
LONGEST_NOTE = 160  # characters of why a way failed


def ways(mode: Mode, precision: Precision, compiled: bool) -> list[Way]:
    """List the ways to run a model: the reference's, ours, and the products of ours alone.

    Args:
        mode: training or inference.
        precision: of the products.
        compiled: whether to run through torch.compile too.
    """
    freezes = (False, True) if mode == "inference" else (False,)
    found = [Way("reference", False, precision, channels_last=last) for last in (False, True)]
    if compiled:
        found += [
            Way("reference", True, precision, channels_last=last, frozen=frozen)
            for frozen in freezes
            for last in (False, True)
        ]
        found += [Way("reference", True, precision, frozen=freezes[-1], autotuned=True)]
    found += [Way("ours", False, precision)]
    if compiled:
        found += [Way("ours", True, precision, frozen=frozen) for frozen in freezes]
    return [*found, Way("products", False, precision)]


def matrix_rate(dtype: str, device: torch.device) -> float:
    """Measure this machine's peak as the FLOP/s of a large square matrix product, best of ten."""
    side = SIDES[device.type]
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=torch_dtype) for _ in range(2))
    times = alternate({"product": lambda: a @ b}, "product", 10, device).seconds["product"]
    return 2 * side**3 / min(times)


def flops(model_name: str, train: bool) -> int:
    """Count the FLOP of one image in matrix products and convolutions; a multiply-add is two."""
    model = make_model(model_name, "ours").train(train)
    images = torch.randn(1 + train, 3, *VIG_SHAPES[model_name].img_size)
    with FlopCounterMode(display=False) as counter:
        logits = model(images)
        if train:
            logits.sum().backward()
    return counter.get_total_flops() // len(images)


def bench_vig(config: VigBench) -> None:
    """Run `python -m benchmarks vig`: time the ways to run models side by side."""
    device = set_up(config)
    precisions = parse_names(config.dtypes, ("float32", "bfloat16"), "--dtypes")
    modes = parse_names(config.modes, ("training", "inference"), "--modes")
    of_timm = [name for name in MODELS if name in VIG_SHAPES]
    model_names = parse_names(config.models, of_timm, "--models")
    rates = {precision: matrix_rate(precision, device) for precision in precisions}
    rows: list[dict[str, object]] = []
    seconds: dict[str, list[float]] = {}
    for model in model_names:
        for mode in cast(Sequence[Mode], modes):
            work = flops(model, mode == "training")
            for precision in cast(Sequence[Precision], precisions):
                entries = [Entry(way, mode) for way in ways(mode, precision, config.compiled)]
                _measure(model, entries, config, device)
                rows += _rows(model, entries, config.batch_size, work / rates[precision])
                seconds |= {
                    f"{model} {mode}: {entry.way}": entry.seconds
                    for entry in entries
                    if entry.outcome == "measured"
                }
    limits = "; ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in rates.items())
    write_page(
        config.out,
        "Images a second",
        f"Batches of {config.batch_size}, {config.threads} thread(s). Every way has a process of "
        "its own, and all of a model, mode and precision take turns, after "
        f"{QUALIFYING} rounds without all but the {FINALISTS} fastest of the reference's. Ratio: "
        "to the best of the reference's, turn by turn, the median with the least and the most; not "
        "measurable where the middle half of the turns differs by more than 20 %. Training: the "
        "reference's forward, backward and fused AdamW, ours the step of vigpipe train; inference: "
        "evaluation mode, ours as vigpipe predict runs it, or compiled with the norms folded into "
        "the weights. Products: the matrix products and convolutions of ours, and nothing else. "
        "The matrix rate is that of a large square product "
        f"in this run ({limits}); a share of it counts products and convolutions as work and "
        "everything else as loss. Memory is what a way adds to its process. Off by: logits of two "
        "images against those of the first row, largest difference; a near-tie that falls the "
        "other way shows there.",
        rows,
        seconds,
        device,
        f"{NUM_WARMUP} steps, and one at the beginning of every turn",
    )


def _measure(model: str, entries: Sequence[Entry], config: VigBench, device: torch.device) -> None:
    """Prepare the ways one by one, then let them take turns."""
    with ExitStack() as workers:
        for entry in entries:
            tell(f"{model}, {entry.mode}: {entry.way} ...")
            shape = (model, entry.way, entry.mode, config.batch_size, device.type)
            kind = Products if entry.way.formulation == "products" else Contender
            entry.worker = workers.enter_context(
                Worker(kind, *shape, config.threads, config.threads)
            )
            try:
                entry.prepared = entry.worker.ask("prepare", seconds=PREPARE_SECONDS)
            except (OutOfTime, WorkerError) as error:
                what = str(error).partition("\n")[0]  # a compiler's command and paths come after
                entry.give_up("failed", what[:LONGEST_NOTE])
        take_turns(entries, min(QUALIFYING, config.repeats))
        # The fewer take turns, the less time passes between those that are compared.
        take_turns(_finalists(entries), config.repeats - QUALIFYING)


def _finalists(entries: Sequence[Entry]) -> list[Entry]:
    """End all but the fastest of the reference's ways, and return what goes on."""
    measured = [e for e in entries if e.outcome == "measured" and e.way.formulation == "reference"]
    slow = sorted(measured, key=lambda e: median(e.seconds))[FINALISTS:]
    for entry in slow:
        entry.end()
    return [entry for entry in entries if entry not in slow]


def _rows(
    model: str, entries: Sequence[Entry], batch_size: int, at_the_rate: float
) -> Iterator[dict[str, object]]:
    """Make the rows of the ways that took turns.

    Args:
        model: name of the model.
        entries: its ways.
        batch_size: images of a step.
        at_the_rate: seconds of the work of an image at the rate of a large matrix product.
    """
    timed = {entry.way: entry.seconds for entry in entries if entry.outcome == "measured"}
    references = {way: turns for way, turns in timed.items() if way.formulation == "reference"}
    most = max(map(len, references.values()), default=0)
    best = best_reference({way: turns for way, turns in references.items() if len(turns) == most})
    first = next((e.prepared.logits for e in entries if e.prepared), [])
    for entry in entries:
        way, prepared = entry.way, entry.prepared
        row: dict[str, object] = {"model": model, "": entry.mode, "way": str(way)}
        if way not in timed or prepared is None:
            yield {**row, "images/s": entry.note}
            continue
        rate = batch_size / median(entry.seconds)
        row |= {
            "images/s": f"{rate:.1f}",
            "ratio": "1 (the best reference)"
            if way == best
            else _ratio(ratios(timed, best, way))
            if best
            else "",
            "of the matrix rate": f"{rate * at_the_rate:.0%}",
            "memory, MB": f"{prepared.peak_bytes / MB:.0f}",
            "first step, s": f"{prepared.first_seconds:.0f}",
        }
        if first and prepared.logits and way.formulation != "products":
            off = relative_difference(torch.tensor(prepared.logits), torch.tensor(first))
            row["logits off by"] = f"{off:.0e}"
        yield row


def _ratio(of_turns: Sequence[float]) -> str:
    """Write the ratio to another way: the median with the least and the most, if turns agree."""
    spread = f"{min(of_turns):.2f} – {max(of_turns):.2f}"
    first, middle, third = quantiles(of_turns, n=4) if len(of_turns) > 1 else [*of_turns] * 3
    if third - first > WIDEST * middle:
        return f"not measurable here ({spread})"
    return f"{median(of_turns):.2f}× ({spread})"
