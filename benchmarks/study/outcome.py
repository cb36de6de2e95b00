"""The outcome of the experiment: the runs of all layouts, and the predictions for them."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.study.configs import SEQUENTIAL, baseline, name_of
from benchmarks.study.measured import MeasuredRun
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import even_plan
from vigpipe.planning.profile import Profile
from vigpipe.planning.step import Request, predict
from vigpipe.timing.recorder import PHASES, Phase


@dataclass(frozen=True)
class Prediction:
    """A training step of a layout, simulated from the costs of the blocks."""

    here_seconds: float  # step seconds on the profiled machine, whose ranks slow each other down
    apart_seconds: float  # step seconds if every rank had its own cores
    # Seconds of adding up gradients over the copies, if every rank had its own cores.
    all_reduce_seconds: float


@dataclass(frozen=True)
class Outcome:
    """All runs of the experiment, and the predictions for their layouts."""

    layouts: Mapping[str, Layout]  # layouts by name, in the order of the tables
    runs: Mapping[str, Sequence[MeasuredRun]]  # runs of every layout by its name, one per round
    # Predictions by name of the layout, baselines that were not run included.
    predictions: Mapping[str, Prediction]
    batch_size: int  # B, samples of one optimizer step over all replicas
    num_warmup: int  # steps, and test batches, at the beginning of a run that were not timed
    num_cores: int  # number of cores that the runs could use
    num_threads: int  # threads of every rank

    @property
    def num_rounds(self) -> int:
        """Number of times that every layout was run."""
        return len(next(iter(self.runs.values())))

    def pooled_seconds(self, name: str, phase: Phase) -> list[float]:
        """Return the seconds of every timed step, or test batch, of all rounds of a layout."""
        return [s for run in self.runs[name] for s in run.step_seconds[phase].values()]

    def ratios(self, name: str, other: str, phase: Phase = "train") -> list[float]:
        """Compute how many times faster a layout is than another one, round by round.

        Args:
            name: name of the layout.
            other: name of the layout that it is compared with.
            phase: training steps or test batches.

        Returns:
            Ratios of the medians, one per round; empty if one of the two was not run.
        """
        if name not in self.runs or other not in self.runs:
            return []
        return [
            median(other_run.step_seconds[phase].values())
            / median(run.step_seconds[phase].values())
            for run, other_run in zip(self.runs[name], self.runs[other], strict=True)
        ]

    def simulated_ratio(self, name: str, other: str) -> float:
        """Compute the ratio of `ratios` for simulated steps with cores for every rank."""
        return self.predictions[other].apart_seconds / self.predictions[name].apart_seconds

    def is_crowded(self, name: str) -> bool:
        """Return whether the threads of all ranks of a layout outnumber the cores."""
        return self.layouts[name].world_size * self.num_threads > self.num_cores


def predict_all(
    profile: Profile, layouts: Mapping[str, Layout], batch_size: int
) -> dict[str, Prediction]:
    """Simulate every layout, its baseline and the whole mini-batch on one stage.

    Args:
        profile: measured costs of the blocks on this machine.
        layouts: layouts by name; all are cut evenly and use gpipe.
        batch_size: B, samples of one optimizer step over all replicas.

    Returns:
        Predictions by name of the layout.
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
            predict(machine, request, cut, "gpipe", 1, layout.num_microbatches)
            for machine in (profile, apart)
        )
        reducing = max(
            sum(s.seconds for s in alone.spans if s.rank == rank and s.kind == "all-reduce")
            for rank in {span.rank for span in alone.spans}
        )
        predictions[name] = Prediction(here.step_seconds, alone.step_seconds, reducing)
    return predictions


def write_rows(outcome: Outcome, path: Path) -> None:
    """Write rows.csv: every step and timed test batch of every run.

    Steps that were not timed have a loss but no seconds; test batches have seconds but no loss.
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
