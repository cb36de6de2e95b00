"""What a training of sub-networks, or of a model as a whole, came to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.options import SubnetworksBench
from benchmarks.trained import (
    TrainedRun,
    best_evaluation,
    largest_peak,
    slowest_step,
    training_seconds,
)
from vigpipe.job.score import SHARES
from vigpipe.run.folder import METRICS
from vigpipe.run.follow import parse_rows

# Options of `vigpipe train`, by the words of a variant.
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "carry-moments": {"carry_moments": True},
    "partition-input": {"partition_input": True},
    "inner": {"divided": "inner"},
    "tied": {"divided": "tied"},
    "branch-rescale": {"branch_rescale": True},
}


class Case(NamedTuple):
    """What differs from run to run."""

    layers: int | None  # of a graph model
    sampler: str  # name of the way to sample a graph; empty for images
    replicas: int  # m; 1 for a model that is trained as a whole
    # How the model is divided, see `VARIANTS`; empty for one that is trained as a whole.
    variant: str
    every: int  # steps of a round; 0 for such a model
    seed: int

    def options(self) -> dict[str, object]:
        """Return the options of `vigpipe train`, without those of the sampler."""
        chosen: dict[str, object] = {"seed": self.seed}
        if self.layers is not None:
            chosen["layers"] = self.layers
        if self.replicas > 1:
            chosen |= {"strategy": "subnetworks", "dp": self.replicas, "average_every": self.every}
            for word in self.variant.split("+"):
                chosen |= VARIANTS[word]
        return chosen

    def __str__(self) -> str:
        words = [] if self.layers is None else [f"{self.layers} layers", self.sampler]
        words.append(f"m = {self.replicas}")
        if self.replicas > 1:
            words += [] if self.variant == "plain" else [self.variant]
            words.append(f"rounds of {self.every} steps")
        return f"{', '.join(words)}, seed {self.seed}"


class Outcome(NamedTuple):
    """What a run came to."""

    layers: int | None  # as for a Case, and so are the next five
    sampler: str
    replicas: int
    variant: str
    every: int
    seed: int
    # On the test samples, at the epoch with the best accuracy of the validation ones.
    accuracy: float
    epoch: int  # number of that epoch
    # Mean of those of the sub-models by themselves, on the test samples at the end; None for a
    # model that is trained as a whole, and so are the next two.
    own_accuracy: float | None
    rounds: int | None  # R
    round_bytes: float | None  # that a replica has sent in a round, on average
    # Share of the weights between two divided layers that no round was expected to train,
    # (1 - 1 / m)^R; None if there are no such weights, 0 in a model as a whole.
    untrained: float | None
    steps: int  # of each replica
    step_seconds: float  # median of the slowest replica's steps, with their data
    seconds: float  # that the slowest replica has worked, waited and exchanged slices
    peak_bytes: int  # largest memory of a rank


def read_outcome(
    options: SubnetworksBench, run: TrainedRun, out: Path, summary: Mapping[str, Any]
) -> Outcome:
    """Read what a finished run came to; see `trained.Question`.

    Raises:
        InputError: nothing is held out for validation.
    """
    case: Case = run.case
    score = SHARES["images" if case.layers is None else "nodes"][0]
    # Whether a model of one or two layers has weights between two divided layers.
    has_hidden = options.model == "gcn2" or options.aggregator == "pool"
    rows = parse_rows((out / METRICS).read_bytes())
    best = best_evaluation(rows, score, out)
    own = rounds = sent = None
    untrained = 0.0
    if case.replicas > 1:
        own = fmean(scores["test"][score] for scores in summary["subnetworks"])
        each: Sequence[Mapping[str, Any]] = summary["replicas"]["each"]
        rounds = -(-summary["steps"] // case.every)
        sent = fmean(replica["bytes_sent"] for replica in each) / rounds
        if has_hidden or (case.layers or 0) > 2:
            untrained = (1 - 1 / case.replicas) ** rounds
        else:
            untrained = None
    return Outcome(
        **case._asdict(),
        accuracy=best[score],
        epoch=best["epoch"],
        own_accuracy=own,
        rounds=rounds,
        round_bytes=sent,
        untrained=untrained,
        steps=summary["steps"],
        step_seconds=slowest_step(rows),
        seconds=training_seconds(summary, rows),
        peak_bytes=largest_peak(summary),
    )
