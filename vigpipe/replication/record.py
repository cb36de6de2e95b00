"""Read the record of what each replica did, and in which order: enough to do all of it again.

A run whose replicas take steps of their own leaves events.jsonl. Each row is about one replica:

    {"replica": 1, "step": 3, "item": 7}       its third step, which it took with item 7
    {"replica": 1, "step": 3, "average": 1}    the first average of all that it came to: after its
                                               third step, or in it if gradients are averaged
    {"replica": 1, "step": 3, "partner": 0}    an average with replica 0 alone, likewise

Before two replicas send one another anything, each has written its row. If one is lost before the
average is complete, the other writes that it goes on alone; and the leader writes who was lost:

    {"replica": 1, "step": 3, "apart": 0}      the average with replica 0 did not take place
    {"replica": 0, "step": 4, "lost": 1}       replica 0 was lost after four steps that count

What a lost replica did after its last average with another one has no effect on the others, so it
is not done again. A replica that comes back with another start ("again") begins with the weights of
another one; such a run cannot be repeated.

With --strategy server, a row says when the server has taken the gradient of an item:

    {"replica": 1, "step": 3, "item": 7, "pulled": 5, "served": 8, "version": 7}

It was computed with the weights after 5 updates, it is the eighth gradient that the server has
taken, and after it there were 7 updates: one of the eight was not finite, or had no samples.

Each replica counts its steps from 1. Nothing else depends on how long anything took. So replicas
that take the same items in the same order, and come to the same averages, end with the same
weights, bit for bit. (A replica that comes to an average of gradients without one of its own, since
no item was left, does so in the step after its last.)

Rows with "did" tell when a replica did what (`replication.diary`): for people, not for replay.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class Recorded:
    """What one replica did, in order."""

    items: list[int] = field(default_factory=list)  # of its steps
    averages: list[int] = field(default_factory=list)  # the steps of those with all replicas
    pairs: list["Pair"] = field(default_factory=list)
    pushes: list["Push"] = field(default_factory=list)  # one for each item
    is_lost: bool = False  # whether it was lost after that
    undone: list[int] = field(default_factory=list)  # items after its last meeting, if it was lost


class Pair(NamedTuple):
    """An average with a partner, in or after a step of this replica."""

    step: int
    partner: int


class Push(NamedTuple):
    """A gradient that a replica has given to the server."""

    pulled: int  # updates of the weights that it was computed with
    served: int  # its number among all gradients that the server has taken, counted from 1
    version: int  # updates after it


def collect(rows: Iterable[Mapping[str, Any]], num_replicas: int) -> list[Recorded]:
    """Collect the rows of events.jsonl, except those that tell how the run was started, by replica.

    Raise ValueError, which shows the row, if one is malformed or not the next one of its replica.
    """
    recorded = [Recorded() for _ in range(num_replicas)]
    for row in rows:
        if "did" in row:
            continue
        replica, step = row.get("replica", -1), row.get("step", -1)
        keys = row.keys() - {"replica", "step"}
        is_push = keys == {"item", *Push._fields}
        numbers = [replica, step, *(row[key] for key in keys)]
        are_counts = all(type(number) is int and 0 <= number <= 10**18 for number in numbers)
        if not are_counts or not (is_push or len(keys) == 1) or replica >= num_replicas:
            raise ValueError(f"{row} is no event of one of {num_replicas} replicas")
        of = recorded[replica]
        key = "item" if is_push else min(keys)
        number, num_items = row[key], len(of.items)
        is_average = step in (num_items, num_items + 1)
        if key == "item" and step == num_items + 1:
            of.items.append(number)
            of.pushes += [Push(*(row[name] for name in Push._fields))] if is_push else []
        elif key == "average" and is_average and number == len(of.averages) + 1:
            of.averages.append(step)
        elif key == "partner" and is_average and number != replica and number < num_replicas:
            of.pairs.append(Pair(step, number))
        elif key == "apart" and of.pairs and of.pairs[-1] == (step, number):
            of.pairs.pop()
        elif key == "lost":
            of.is_lost = True
        elif key == "again":
            raise ValueError(f"replica {replica} has come back, as a copy of replica {number}")
        else:
            raise ValueError(f"{row} is not the next event of its replica")
    _check_pairs(recorded)
    _check_pushes(recorded)
    return recorded


def _check_pairs(recorded: Sequence[Recorded]) -> None:
    """Raise ValueError unless the replicas can meet as recorded, each in its own order.

    What a lost replica did after its last meeting is deleted, but for the items as `undone`.
    """
    left = [deque(pair.partner for pair in of.pairs) for of in recorded]
    to_look_at = list(range(len(recorded)))
    while to_look_at:
        replica = to_look_at.pop()
        while left[replica] and left[left[replica][0]] and left[left[replica][0]][0] == replica:
            partner = left[replica].popleft()
            left[partner].popleft()
            to_look_at.append(partner)
    for replica, partners in enumerate(left):
        of = recorded[replica]
        if of.is_lost and not of.pushes:
            del of.pairs[len(of.pairs) - len(partners) :]
            num_kept = of.pairs[-1].step if of.pairs else 0
            of.items, of.undone = of.items[:num_kept], of.items[num_kept:]
        elif partners:
            raise ValueError(f"replica {replica} would wait for {partners[0]} for ever")


def _check_pushes(recorded: Sequence[Recorded]) -> None:
    """Raise ValueError unless the server can take the recorded gradients one after the other."""
    pushes = [(push, replica) for replica, of in enumerate(recorded) for push in of.pushes]
    if not pushes:
        return
    if len(pushes) < sum(len(of.items) for of in recorded):
        raise ValueError("some items have gone to a server, and others have not")
    pushes.sort(key=lambda push: push[0].served)
    version, seen = 0, [0] * len(recorded)  # updates in all, and those that each replica has seen
    for number, (push, replica) in enumerate(pushes, 1):
        is_next = push.served == number and push.version - version in (0, 1)
        if not is_next or not seen[replica] <= push.pulled <= version:
            raise ValueError(f"{push} of replica {replica} cannot come after {version} updates")
        version = seen[replica] = push.version
