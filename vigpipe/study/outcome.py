"""The experiment's outcome: every run beside the others, and what was predicted for its layout."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import even_plan
from vigpipe.planning.profile import Profile
from vigpipe.planning.step import Request, predict
from vigpipe.spans import seconds_by_kind
from vigpipe.study.configs import SEQUENTIAL, baseline, name_of
from vigpipe.study.measured import MeasuredRun
from vigpipe.timing.recorder import PHASES, Phase


@dataclass(frozen=True)
class Prediction:
    """A training step, simulated from what the blocks cost.

    Attributes:
        here_seconds: on the machine that was profiled, whose ranks hinder one another.
        apart_seconds: with cores of its own for every rank.
        all_reduce_seconds: adding gradients up over the copies, of the latter.
    """

    here_seconds: float
    apart_seconds: float
    all_reduce_seconds: float


@dataclass(frozen=True)
class Outcome:
    """All runs.

    Attributes:
        layouts: by name, in the order of the tables.
        runs: of every layout, one a round.
        predictions: by name, also of baselines that were not run.
        batch_size: B.
        num_warmup: steps, and test batches, of a run that were not timed.
        num_cores: that the runs had.
        num_threads: of a rank.
    """

    layouts: Mapping[str, Layout]
    runs: Mapping[str, Sequence[MeasuredRun]]
    predictions: Mapping[str, Prediction]
    batch_size: int
    num_warmup: int
    num_cores: int
    num_threads: int

    @property
    def num_rounds(self) -> int:
        """Times that every layout ran."""
        return len(next(iter(self.runs.values())))

    def pooled_seconds(self, name: str, phase: Phase) -> list[float]:
        """Of every timed step, or test batch, of all rounds."""
        return [s for run in self.runs[name] for s in run.step_seconds[phase].values()]

    def ratios(self, name: str, other: str, phase: Phase = "train") -> list[float]:
        """How many times faster a layout is than another one, by their medians, round by round.

        Empty where one of the two was not run.
        """
        if name not in self.runs or other not in self.runs:
            return []
        return [
            median(its.step_seconds[phase].values()) / median(own.step_seconds[phase].values())
            for own, its in zip(self.runs[name], self.runs[other], strict=True)
        ]

    def simulated_ratio(self, name: str, other: str) -> float:
        """The same of simulated training steps with cores for every rank."""
        own, its = self.predictions[name], self.predictions[other]
        return its.apart_seconds / own.apart_seconds

    def is_crowded(self, name: str) -> bool:
        """Whether the threads of all ranks outnumber the cores."""
        return self.layouts[name].world_size * self.num_threads > self.num_cores


def predict_all(
    profile: Profile, layouts: Mapping[str, Layout], batch_size: int
) -> dict[str, Prediction]:
    """Simulate every layout, its baseline and the whole mini-batch on one stage.

    Args:
        profile: what the blocks cost here.
        layouts: even cuts, gpipe.
        batch_size: B.
    """
    most = max(layout.world_size for layout in layouts.values())
    apart = replace(profile, slowdown=(1.0,) * most)
    wanted = {SEQUENTIAL: Layout()}
    for layout in layouts.values():
        wanted |= {name_of(base := baseline(layout)): base, name_of(layout): layout}
    predictions: dict[str, Prediction] = {}
    for name, layout in wanted.items():
        request = Request(
            num_ranks=layout.pipeline_size,
            num_replicas=layout.num_replicas,
            batch_size=batch_size,
            microbatches=(layout.num_microbatches,),
        )
        cut = even_plan(len(profile.blocks), layout.pipeline_size).stages
        here, alone = (
            predict(own, request, cut, "gpipe", 1, layout.num_microbatches)
            for own in (profile, apart)
        )
        reducing = max(
            seconds_by_kind(span for span in alone.spans if span.rank == rank)["all-reduce"]
            for rank in {span.rank for span in alone.spans}
        )
        predictions[name] = Prediction(here.step_seconds, alone.step_seconds, reducing)
    return predictions


def write_rows(outcome: Outcome, path: Path) -> None:
    """Write rows.csv: every step and timed test batch of every run.

    Steps that were not timed have a loss and no seconds, test batches seconds and no loss.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["round", "config", "step", "loss", "step_seconds", "phase"])
        for runs in zip(*outcome.runs.values(), strict=True):
            for run in runs:
                for phase in PHASES:
                    seconds = run.step_seconds[phase]
                    losses = run.losses if phase == "train" else {}
                    for step in sorted({*seconds, *losses}):
                        taken = f"{seconds[step]:.9f}" if step in seconds else ""
                        numbers = (step, losses.get(step, ""), taken)
                        table.writerow([run.round_number, run.name, *numbers, phase])
