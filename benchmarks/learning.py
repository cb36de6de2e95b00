"""What does each way to agree learn? Real training runs, equal items, several seeds.

Every run is `vigpipe train` with the same options, but for the strategy and the seed. What is
compared is what a run keeps at its end, on the test images: the mean of the replicas. With
validation images, it is the best replica where gradients were averaged, as GossipGCN was published:
those replicas drift apart.

With --sleep, an item takes each replica some seconds more, and with --slow the last one a multiple
of that. Then the time of the runs is told, too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from benchmarks.options import LearningBench
from benchmarks.trained import PROGRAM, Question, Table, TrainedRun, check_seeds
from vigpipe.config.options import TrainConfig
from vigpipe.config.replication import with_replication_defaults
from vigpipe.errors import InputError

# Options of each way to agree; how often to average is the user's. An average with an overlap is
# applied after a quarter of the steps to the next one.
WAYS: dict[str, dict[str, str]] = {
    "synchronous": {},
    "synchronous, bfloat16": {"compress": "bfloat16"},
    "synchronous, top-k:0.01": {"compress": "top-k:0.01"},
    "synchronous, powersgd:2": {"compress": "powersgd:2"},
    "periodic, weights": {"strategy": "periodic", "average": "weights"},
    "periodic, outer": {"strategy": "periodic", "average": "outer"},
    "periodic, outer, top-k:0.1": {
        "strategy": "periodic",
        "average": "outer",
        "compress": "top-k:0.1",
    },
    "periodic, outer, overlap": {"strategy": "periodic", "average": "outer"},
    "periodic, gradients": {"strategy": "periodic", "average": "gradients"},
    "gossip, weights": {"strategy": "gossip", "average": "weights"},
    "gossip, gradients": {"strategy": "gossip", "average": "gradients"},
    "server": {"strategy": "server"},
}


class Learned(NamedTuple):
    """What a run has learned."""

    way: str  # one of WAYS
    seed: int
    top1: float  # share of test images that are classified rightly by what the run keeps
    loss: float  # on the test images
    seconds: float  # of the run, until its results were written


def _plan(options: LearningBench) -> list[TrainedRun]:
    check_seeds(options.seeds)
    if not 0 <= options.sleep <= 60 or not 1 <= options.slow <= 1000:
        raise InputError(
            f"--sleep {options.sleep:g} --slow {options.slow:g}: must be from 0 to 60, and from 1 "
            "to 1000"
        )
    if options.slow > 1 and not options.sleep:
        raise InputError(f"--slow {options.slow:g}: is a multiple of --sleep, which is not given")
    if options.sleep and options.stages != 1:
        raise InputError(f"--sleep {options.sleep:g}: is for --stages 1, not {options.stages}")
    if options.strategy != "synchronous":
        raise InputError(f"--strategy {options.strategy}: every strategy is run here; leave it out")
    ways = chosen_ways(options.ways)
    return [_run(options, way, seed) for seed in range(options.seeds) for way in ways]


def chosen_ways(words: str) -> list[str]:
    """Return the ways that some words choose, and synchronous, which they are compared with.

    Args:
        words: with commas between them; a way is chosen by each that is part of its name.

    Raises:
        InputError: a word is part of no name.
    """
    chosen = {"synchronous"}
    for word in words.split(","):
        found = {way for way in WAYS if word.strip() in way}
        if not found:
            raise InputError(f"--ways {words}: {word!r} is part of no name: {'; '.join(WAYS)}")
        chosen |= found
    return [way for way in WAYS if way in chosen]


def options_of(options: LearningBench, way: str, seed: int) -> dict[str, object]:
    """Return the options of a run that are not those of all."""
    chosen: dict[str, object] = {**WAYS[way], "seed": seed}
    averaging = _averaging(options)
    if "strategy" in chosen:
        chosen["items"] = averaging.items
    if "average" in chosen:
        every = averaging.average_every or 1
        chosen["average_every"] = every
        if "overlap" in way:
            chosen["overlap"] = -(-every // 4) if every > 1 else 0
        if options.validation and chosen["average"] == "gradients":
            chosen["final"] = "best"
    return chosen


def _averaging(options: LearningBench) -> TrainConfig:
    """Return options that say how often and with which items replicas are averaged."""
    given = TrainConfig(
        strategy="periodic", average_every=options.average_every, items=options.items
    )
    return with_replication_defaults(given)


def _run(options: LearningBench, way: str, seed: int) -> TrainedRun:
    chosen, program = options_of(options, way, seed), PROGRAM
    if options.sleep:
        num_ranks = options.dp + (chosen.get("strategy") == "server")
        slowness = num_ranks, options.sleep, options.slow, options.dp
        program = ("benchmarks.slowed", *map(str, slowness))
    folder = f"{way.replace(', ', '-').replace(':', '')}-{seed}"
    return TrainedRun(f"{way} with seed {seed}", folder, chosen, (way, seed), program)


def _read(
    options: LearningBench, run: TrainedRun, out: Path, summary: Mapping[str, Any]
) -> Learned:
    (way, seed), test = run.case, summary["test"]
    return Learned(way, seed, test["top1"], test["loss"], summary["wall_seconds"])


def _page(
    options: LearningBench, learned: Sequence[Learned], folder: Path
) -> tuple[str, list[Table]]:
    by_way: dict[str, list[Learned]] = {}
    for found in learned:
        by_way.setdefault(found.way, []).append(found)
    rows = [_row(way, found, by_way["synchronous"]) for way, found in by_way.items()]
    headers = ["", "top-1", "min – max", "less than synchronous, seed by seed", "test loss"]
    headers += ["seconds", "times as fast as synchronous"]
    if not options.sleep:  # then seconds only tell how busy the machine was
        rows, headers = [row[:-2] for row in rows], headers[:-2]
    averaging = _averaging(options)
    best = "; where gradients were averaged, the best one on the validation images"
    best = best if options.validation else ""
    words = (
        f"{options.model} on {options.data}, {options.dp} replicas, the same items for all; "
        f"--average-every {averaging.average_every}, --items {averaging.items}. Kept at the end is "
        f"the mean of the replicas{best}, or what the server has. Seeds: {options.seeds}; ± is the "
        "standard deviation over them."
    )
    if options.sleep:
        words += (
            f" Each replica sleeps {options.sleep:g} s before an item, and the last one "
            f"{options.sleep * options.slow:g} s. Seconds and ratios are medians."
        )
    return words, [Table("", headers, rows)]


def _row(way: str, found: Sequence[Learned], base: Sequence[Learned]) -> tuple[str, ...]:
    top1 = [f.top1 for f in found]
    losses = [f.loss for f in found]
    less = [b.top1 - f.top1 for b, f in zip(base, found, strict=True)]
    ratios = [b.seconds / f.seconds for b, f in zip(base, found, strict=True)]
    spread = f" ± {stdev(top1):.2%}" if len(top1) > 1 else ""
    return (
        way,
        f"{fmean(top1):.2%}{spread}",
        f"{min(top1):.2%} – {max(top1):.2%}",
        " ".join(f"{100 * value:.2f}" for value in less),
        f"{fmean(losses):.4f}",
        f"{median(f.seconds for f in found):.1f}",
        f"{median(ratios):.2f}",
    )


QUESTION = Question(
    title="What each way to agree learns",
    not_shared=("seed", "average_every", "items", "seeds", "ways", "sleep", "slow"),
    plan=_plan,
    read=_read,
    told=lambda found: f"top-1 {found.top1:.2%}, loss {found.loss:.4f}",
    page=_page,
)
