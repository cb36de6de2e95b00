"""What replicas did, in which order each of them did it: enough to do all of it again.

A run whose replicas take steps of their own leaves events.jsonl. Each row is of one replica:

    {"replica": 1, "step": 3, "item": 7}       its third step, which it took with item 7
    {"replica": 1, "step": 3, "average": 1}    the first average of all that it came to: after its
                                               third step, or in it if gradients are averaged
    {"replica": 1, "step": 3, "partner": 0}    an average with replica 0 alone, likewise

Before two replicas send one another anything, each has written its row. If one is lost before the
average is complete, the other says that it goes on alone; and the head says who was lost:

    {"replica": 1, "step": 3, "apart": 0}      the average with replica 0 did not take place
    {"replica": 0, "step": 4, "lost": 1}       replica 0 was lost after four steps that count

What a lost replica did after its last average with one that was left has no effect on anybody, so
it is not done again. A replica that comes back with another start ("again") begins with the weights
of another; such a run cannot be repeated.

With --strategy server, a row says when the server has taken the gradient of an item:

    {"replica": 1, "step": 3, "item": 7, "pulled": 5, "served": 8, "version": 7}

It was computed with the weights after 5 updates, it is the eighth that was taken of all, and after
it there were 7 updates: one gradient among the eight was not finite, or had no samples.

Steps are counted from 1, the replica's own. Nothing else depends on how long anything took. So
whoever takes the same items in the same order, and comes to the same averages, ends in the same
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
    """What one replica did.

    Attributes:
        items: the items of its steps, in order.
        averages: the steps of its averages with all replicas, in order.
        pairs: its averages with one other replica, in order.
        pushes: of its gradients to the server, one for each item, in order.
        is_lost: whether it was lost after that.
    """

    items: list[int] = field(default_factory=list)
    averages: list[int] = field(default_factory=list)
    pairs: list["Pair"] = field(default_factory=list)
    pushes: list["Push"] = field(default_factory=list)
    is_lost: bool = False


class Pair(NamedTuple):
    """An average of two replicas, as one of them sees it.

    Attributes:
        step: of this replica, in or after which it takes place.
        partner: the other one.
    """

    step: int
    partner: int


class Push(NamedTuple):
    """A gradient that a replica has given to the server.

    Attributes:
        pulled: updates of the weights that it was computed with.
        served: its number among all gradients that the server has taken, counted from 1.
        version: updates after it.
    """

    pulled: int
    served: int
    version: int


def collect(rows: Iterable[Mapping[str, Any]], num_replicas: int) -> list[Recorded]:
    """Collect the rows of events.jsonl by replica.

    Args:
        rows: the rows, without those that tell how the run was started; those of when a replica
            did what are passed over.
        num_replicas: D.

    Raises:
        ValueError: a row is malformed, or not the next one of its replica; it is shown.
    """
    recorded = [Recorded() for _ in range(num_replicas)]
    for row in rows:
        if "did" in row:
            continue
        replica, step = row.get("replica", -1), row.get("step", -1)
        kinds = row.keys() - {"replica", "step"}
        is_push = kinds == {"item", *Push._fields}
        numbers = [replica, step, *(row[kind] for kind in kinds)]
        is_event = all(map(_is_count, numbers)) and (is_push or len(kinds) == 1)
        if not is_event or replica >= num_replicas:
            raise ValueError(f"{row} is no event of one of {num_replicas} replicas")
        of = recorded[replica]
        kind = "item" if is_push else min(kinds)
        number, num_items = row[kind], len(of.items)
        is_average = step in (num_items, num_items + 1)
        if kind == "item" and step == num_items + 1:
            of.items.append(number)
            of.pushes += [Push(*(row[name] for name in Push._fields))] if is_push else []
        elif kind == "average" and is_average and number == len(of.averages) + 1:
            of.averages.append(step)
        elif kind == "partner" and is_average and number != replica and number < num_replicas:
            of.pairs.append(Pair(step, number))
        elif kind == "apart" and of.pairs and of.pairs[-1] == (step, number):
            of.pairs.pop()
        elif kind == "lost":
            of.is_lost = True
        elif kind == "again":
            raise ValueError(f"replica {replica} has come back, as a copy of replica {number}")
        else:
            raise ValueError(f"{row} is not the next event of its replica")
    _check_pairs(recorded)
    _check_pushes(recorded)
    return recorded


def _check_pairs(recorded: Sequence[Recorded]) -> None:
    """Raise ValueError unless the replicas can meet as recorded, each in its own order.

    Of a lost replica, what it did after its last meeting is left out.
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
            del of.items[of.pairs[-1].step if of.pairs else 0 :]
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
    version, least = 0, [0] * len(recorded)  # updates that each replica has seen
    for place, (push, replica) in enumerate(pushes, 1):
        is_next = push.served == place and push.version - version in (0, 1)
        if not is_next or not least[replica] <= push.pulled <= version:
            raise ValueError(f"{push} of replica {replica} cannot come after {version} updates")
        version = least[replica] = push.version


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= 10**18
