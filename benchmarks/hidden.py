"""How much of the time that reading images takes is hidden behind the steps of a training run?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from benchmarks.effort import Effort, measure
from benchmarks.loaders import TRAINING
from benchmarks.options import FeedBench
from vigpipe.config.options import TrainConfig
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.data.reader import AHEAD
from vigpipe.launch.device import has_own_cores
from vigpipe.launch.environment import threads_per_rank
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.run.facts import prepare
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import complete_step, train_step

MEMORY, WORKERS, RANK = "in memory", "read by workers", "read by the rank"
NUM_STEPS = 5  # of a repeat
SMALL_SIDE = 32  # pixels, for models that take images of any size
BUSY = 0.9  # share of the cores, or of a worker's time, from which on they count as all busy


@dataclass(frozen=True)
class Steps:
    """What the steps of a training run have cost, by how they get their batches."""

    # Of NUM_STEPS steps, by MEMORY, WORKERS and RANK, in the order of the repeats.
    efforts: Mapping[str, Sequence[Effort]]
    model: str
    side: int  # of its images in pixels
    batch_size: int  # images of a step
    num_workers: int  # processes that read ahead
    num_cores: int  # cores that this process may use

    def milliseconds(self, way: str) -> float:
        """Compute the median duration of a step."""
        return 1e3 * median(effort.seconds for effort in self.efforts[way]) / NUM_STEPS

    def hidden_shares(self) -> list[float] | None:
        """Compute, repeat by repeat, which share of the reading's time workers hide.

        Returns:
            1 where a step with workers takes no longer than with batches in memory, 0 where it
            takes as long as if the rank read them, and anything else by noise or contention; None
            if the reading did not make every repeat longer, so that its time is not known.
        """
        seconds = [
            [effort.seconds for effort in self.efforts[way]] for way in (MEMORY, WORKERS, RANK)
        ]
        rounds = list(zip(*seconds, strict=True))
        if any(by_rank <= in_memory for in_memory, _, by_rank in rounds):
            return None
        return [hidden_share(*of_round) for of_round in rounds]

    def rows(self) -> list[dict[str, str]]:
        """Make the rows of a table, one for each way."""
        return [
            {
                "batches": way,
                "ms a step": f"{self.milliseconds(way):.0f}",
                "min – max": " – ".join(
                    f"{1e3 * bound(effort.seconds for effort in efforts) / NUM_STEPS:.0f}"
                    for bound in (min, max)
                ),
                "busy cores": f"{median(effort.busy_cores for effort in efforts):.2f}",
            }
            for way, efforts in self.efforts.items()
        ]

    def explain(self) -> str:
        """Say in sentences how much is hidden, and by the measured CPU time, why not all of it."""
        shares = self.hidden_shares()
        in_memory = self.milliseconds(MEMORY)
        by_rank, by_workers = (self.milliseconds(way) - in_memory for way in (RANK, WORKERS))
        if shares is None:
            said = (
                f"Whether the rank reads is lost in the noise of its steps of {in_memory:.0f} ms: "
                "there is nothing to hide, or the machine is too busy to tell."
            )
        else:
            said = (
                f"Reading adds {by_rank:.0f} ms to a step of {in_memory:.0f} ms if the rank does "
                f"it, and {by_workers:.0f} ms with {self.num_workers} worker(s): "
                f"{_in_words(median(shares))} ({min(shares):.0%} – {max(shares):.0%}) is hidden."
            )
        return f"{said} {self._why()}"

    def _why(self) -> str:
        cores, workers, rank = (
            median(values)
            for values in zip(
                *(
                    (
                        effort.busy_cores,
                        effort.worker_cpu_seconds / effort.seconds / self.num_workers,
                        effort.rank_cpu_seconds / NUM_STEPS,
                    )
                    for effort in self.efforts[WORKERS]
                ),
                strict=True,
            )
        )
        alone = median(effort.rank_cpu_seconds for effort in self.efforts[MEMORY]) / NUM_STEPS
        used = f"{cores:.2f} of {self.num_cores} cores were busy with steps and workers"
        more = (
            f"the rank itself spent {1e3 * (rank - alone):+.0f} ms of CPU time a step against "
            "batches in memory, on normalising, on erasing and on sharing the machine with workers"
        )
        if cores >= BUSY * self.num_cores:
            return (
                f"{used}: no core was free to read on, so what workers do is missing elsewhere; "
                f"{more}."
            )
        if workers >= BUSY:
            return (
                f"The workers were busy {workers:.0%} of the time, so steps waited for them: more "
                f"--workers hide more; {used}."
            )
        return (
            f"The workers were busy only {workers:.0%} of the time, so batches were ready when the "
            f"rank asked for them; {more}; {used}."
        )


def hidden_share(in_memory: float, by_workers: float, by_rank: float) -> float:
    """Compute which share of the time that a rank takes to read is saved by workers.

    Args:
        in_memory: seconds of a step whose batch is in memory already.
        by_workers: seconds of a step whose batch is read by workers, ahead of time.
        by_rank: seconds of a step whose batch the rank reads; more than in_memory.
    """
    return 1 - (by_workers - in_memory) / (by_rank - in_memory)


def _in_words(share: float) -> str:
    if share >= 1:
        return "all of it"
    return f"{share:.0%} of it" if share > 0 else "none of it"


def measure_steps(config: FeedBench, device: torch.device) -> Steps:
    """Train with batches in memory, read by workers and read by the rank, in turn.

    Args:
        config: the options; --model, --pictures, --batch-size, --workers, --threads and --repeats
            count.
        device: device to run on.
    """
    model = config.model or ("vig_ti_224" if has_own_cores(device) else "vig_cifar_ti")
    side = MODEL_DEFAULTS[model].image_size or SMALL_SIDE
    options = TrainConfig(
        model=model,
        data=str(config.pictures),
        image_size=side,
        auto_augment=TRAINING.auto_augment,
        erasing=TRAINING.erasing,
        batch_size=config.batch_size,
        workers=config.workers,
        threads=config.threads,
    )
    run = prepare(options, torch.float32)
    rank_state = make_rank_state(run, 0, device)
    without_workers = replace(run, config=replace(run.config, workers=0))
    by_rank = make_rank_state(without_workers, 0, device).feed
    batch = rank_state.feed.batch(0)
    ways: dict[str, Callable[[int, int], ReplicaBatch]] = {
        MEMORY: lambda step, end: batch,
        WORKERS: lambda step, end: rank_state.feed.batch(step, range(step + 1, end)),
        RANK: lambda step, end: by_rank.batch(step),
    }
    efforts: dict[str, list[Effort]] = {way: [] for way in ways}
    for repeat in range(1 + config.repeats):
        for way, batch_of in ways.items():
            num_ahead = AHEAD * config.workers if way == WORKERS else 0
            effort = _train(rank_state, batch_of, num_ahead)
            if repeat > 0:
                efforts[way].append(effort)
    rank_state.feed.close()
    num_cores = threads_per_rank(None, 1, {})
    return Steps(efforts, model, side, config.batch_size, config.workers, num_cores)


def _train(
    rank_state: RankState, batch_of: Callable[[int, int], ReplicaBatch], num_ahead: int
) -> Effort:
    """Time NUM_STEPS steps in the midst of others, so that workers are as far ahead as they get.

    Args:
        rank_state: trains.
        batch_of: gives the batch of a step; workers read ahead up to another step.
        num_ahead: most batches that the workers read ahead.
    """
    start = num_ahead + 1
    end = start + NUM_STEPS + num_ahead

    def train(steps: range) -> None:
        for step in steps:
            train_step(rank_state, batch_of(step, end))
        complete_step(rank_state)

    train(range(start))
    effort = measure(lambda: train(range(start, start + NUM_STEPS)), rank_state.device)
    for step in range(start + NUM_STEPS, end):
        batch_of(step, end)
    return effort
