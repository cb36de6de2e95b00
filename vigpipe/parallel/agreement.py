"""Let ranks agree: by a status once a step, and by a comparison before the first."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.errors import InputError, PeerLostError
from vigpipe.parallel.values import all_gather_values

T = TypeVar("T")
HEARTBEAT_SECONDS = 1.0  # A rank says so often that it is alive.
EXCHANGE_SECONDS = 0.02  # Statuses are exchanged so often while a rank is not ready.
POLL_SECONDS = 1e-4  # A rank looks so often whether it is ready.


class Peers(NamedTuple):
    """The ranks that take every step together, this one among them."""

    size: int = 1
    group: dist.ProcessGroup | None = None  # None for all ranks of the run


class Status(NamedTuple):
    """What a rank tells its peers before they step their optimizers."""

    finite: bool = True  # its gradients are, and the loss if it has the last stage
    stop: bool = False  # it was asked to save and stop
    save: bool = False  # it considers a checkpoint to be due
    empty: bool = False  # its share of the step has nothing to train on
    busy_seconds: float = 0.0  # of the previous step's forwards and backwards, without waiting
    data_seconds: float = 0.0  # for which it waited for the batch of the step


NOTHING_WANTED = Status()


@dataclass
class Agreement:
    """The statuses of all peers in one step, in rank order; the same on every one of them."""

    statuses: Sequence[Status]

    @property
    def finite(self) -> bool:
        return all(status.finite for status in self.statuses)

    @property
    def stop(self) -> bool:
        return any(status.stop for status in self.statuses)

    @property
    def save(self) -> bool:
        return any(status.save for status in self.statuses)

    @property
    def empty(self) -> bool:
        return all(status.empty for status in self.statuses)

    @property
    def busy_seconds(self) -> list[float]:
        return [status.busy_seconds for status in self.statuses]

    @property
    def data_seconds(self) -> float:
        """Seconds that the slowest peer waited for its batch."""
        return max(status.data_seconds for status in self.statuses)


def agree(
    status: Status,
    peers: Peers,
    until: Callable[[], bool] = lambda: True,
    timeout_seconds: float | None = None,
) -> Agreement:
    """Exchange the statuses of peers in small all-gathers on the host; each of them calls this.

    They are exchanged again and again until every peer is ready. So one that is lost is noticed at
    once, also while the GPUs wait for one another. `until` says whether this rank is ready, for
    which it waits for `timeout_seconds` at most. Raise PeerLostError if it is not ready in time, or
    torch's RuntimeError if a peer was lost.
    """
    began = time.monotonic()
    while True:
        is_ready = becomes_true(until, EXCHANGE_SECONDS)
        if peers.size == 1:
            everybody, statuses = is_ready, [status]
        else:
            own = torch.tensor([float(is_ready), *map(float, status)], dtype=torch.float64)
            gathered = own.new_empty(peers.size * len(own))
            dist.all_gather_into_tensor(gathered, own, group=peers.group)
            rows = gathered.view(peers.size, -1).tolist()
            everybody = all(row[0] for row in rows)
            statuses = [Status(*map(bool, row[1:5]), *row[5:]) for row in rows]
        if everybody:
            return Agreement(statuses)
        waited = time.monotonic() - began
        if not is_ready and timeout_seconds is not None and waited > timeout_seconds:
            raise PeerLostError(
                f"Timed out waiting {1000 * waited:.0f}ms for the device to end a step, although "
                "all peers are alive"
            )


def holds_everywhere(flag: Tensor, peers: Peers) -> Tensor:
    """Tell on the device whether a flag, a scalar there, is set on all peers; each calls this.

    The flags are counted. If a peer dies, the collective is aborted, and what it leaves behind
    cannot be the count of all peers: then the flag holds nowhere.
    """
    count = flag.float().reshape(1)
    if peers.size > 1:
        dist.all_reduce(count, group=peers.group)
    return (count == peers.size)[0]


def becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for some seconds at most until a condition holds, and return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def run_with_heartbeats(
    work: Callable[[], T], world_size: int, group: dist.ProcessGroup | None = None
) -> T:
    """Run work that may take one rank longer than a collective's timeout; every rank calls this.

    The work of a rank runs in a thread, and may do nothing. The ranks exchange a heartbeat every
    second until all of them are done, so that ranks with less work do not give up on the others.
    If the work raises, so does this on its rank, and the other ranks lose a peer.
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
        wait([future], HEARTBEAT_SECONDS)
        if future.done():
            future.result()  # raises what the work raised
        if all(all_gather_values(future.done(), world_size, group)):
            return future.result()


def check_alike(find: Callable[[], Mapping[str, Mapping[str, Any]]], world_size: int) -> None:
    """Raise InputError on every rank unless all are about to do the same; every rank calls this.

    What a rank is about to do is a table of names and values for each subject ("options", "data",
    "software"); to find it may take longer than a collective's timeout. The message names the first
    difference from rank 0.
    """
    facts = run_with_heartbeats(find, world_size)
    texts = all_gather_values(json.dumps(facts, default=str), world_size)
    first_facts: dict[str, dict[str, Any]] = json.loads(texts[0])
    for rank, text in enumerate(texts):
        rank_facts: dict[str, dict[str, Any]] = json.loads(text)
        for subject, expected in first_facts.items():
            actual = rank_facts.get(subject, {})
            for name in {**expected, **actual}:
                if actual.get(name) != expected.get(name):
                    raise InputError(
                        f"ranks differ in their {subject}: {name} is {actual.get(name)!r} on rank "
                        f"{rank}, but {expected.get(name)!r} on rank 0; start all of them with the "
                        "same command line, software and data"
                    )
