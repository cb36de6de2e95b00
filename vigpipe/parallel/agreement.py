"""What ranks tell each other: a few numbers once a step, and who they are before the first."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from vigpipe.errors import InputError

T = TypeVar("T")
SIGN_SECONDS = 1.0  # between two signs of life


class Status(NamedTuple):
    """What a rank tells all others before they step their optimizers.

    Attributes:
        finite: its gradients, and the loss if it has the last stage, are finite numbers.
        stop: it was asked to save and stop.
        save: it finds that a checkpoint is due.
        busy_seconds: what its forwards and backwards of the step before took, without waiting.
    """

    finite: bool = True
    stop: bool = False
    save: bool = False
    busy_seconds: float = 0.0


NOTHING_WANTED = Status()


@dataclass
class Agreement:
    """What all ranks said in a step; the same on every rank.

    Attributes:
        statuses: by rank.
    """

    statuses: Sequence[Status]

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite."""
        return all(status.finite for status in self.statuses)

    @property
    def stop(self) -> bool:
        """Whether a rank was asked to stop."""
        return any(status.stop for status in self.statuses)

    @property
    def save(self) -> bool:
        """Whether a rank wants a checkpoint."""
        return any(status.save for status in self.statuses)

    @property
    def busy_seconds(self) -> list[float]:
        """By rank."""
        return [status.busy_seconds for status in self.statuses]


def agree(status: Status, world_size: int, device: torch.device) -> Agreement:
    """Exchange the status of all ranks; one small all-gather, none for a rank alone."""
    if world_size == 1:
        return Agreement([status])
    mine = torch.tensor([float(value) for value in status], dtype=torch.float64, device=device)
    rows = mine.new_empty(world_size * len(mine))
    dist.all_gather_into_tensor(rows, mine)
    return Agreement(
        [
            Status(bool(finite), bool(stop), bool(save), seconds)
            for finite, stop, save, seconds in rows.view(world_size, -1).tolist()
        ]
    )


def broadcast_value(value: Any, world_size: int) -> Any:  # noqa: ANN401
    """Rank 0's value on every rank."""
    if world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_values(value: Any, world_size: int) -> list[Any]:  # noqa: ANN401
    """Every rank's value, by rank."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def run_with_heartbeats(work: Callable[[], T], world_size: int) -> T:
    """Do work that takes one rank longer than a collective waits; every rank calls this.

    The ranks tell each other once a second that they are alive, until all are done.

    Args:
        work: of this rank, away from the main thread; may be nothing.
        world_size: number of ranks.

    Returns:
        What this rank's work has returned.
    """
    if world_size == 1:
        return work()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while True:
        wait([future], SIGN_SECONDS)
        if future.done():
            future.result()  # raises what it has raised: the others lose a peer
        if all(all_gather_values(future.done(), world_size)):
            return future.result()


def check_alike(facts: Mapping[str, Mapping[str, Any]], world_size: int) -> None:
    """Compare what all ranks are about to do; every rank calls it.

    Args:
        facts: by subject ("options", "versions", ...), by name.
        world_size: number of ranks.

    Raises:
        InputError: on every rank, if one differs from rank 0; it names the first difference.
    """
    texts = all_gather_values(json.dumps(facts, default=str), world_size)
    wanted: dict[str, dict[str, Any]] = json.loads(texts[0])
    for rank, text in enumerate(texts):
        found: dict[str, dict[str, Any]] = json.loads(text)
        for subject in wanted:
            theirs, ours = found.get(subject, {}), wanted[subject]
            for name in {**ours, **theirs}:
                if theirs.get(name) != ours.get(name):
                    raise InputError(
                        f"ranks differ in their {subject}: {name} is {theirs.get(name)!r} on rank "
                        f"{rank}, but {ours.get(name)!r} on rank 0; start all of them with the "
                        "same command line, software and data"
                    )
