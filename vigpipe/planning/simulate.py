r"""Simulate one training step: when each rank computes, waits, and adds gradients up.

A rank takes its actions in their order. An action starts when the rank is free and its input has
arrived:

    sender     [forward 0]                        the sender goes on at once
                          \__ transfer __
    receiver   [ .....  busy ..... ][wait input  ][forward 0]

A transfer begins when the sender has ended and the receiver has asked for it. The receiver above
asks when it gets to the action. If it had asked ahead, the transfer would begin at the sender's end
and be hidden; `schedules.messages_ahead` knows who does. Ranks that compute at the same time on one
host share it: with n of them each proceeds at 1 / slowdown[n - 1] of its speed (processor sharing),
and the speeds change at every event.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vigpipe.planning.engine import Operation, Simulation
from vigpipe.schedules import Orders
from vigpipe.spans import WAITING, Span


@dataclass(frozen=True)
class StageCosts:
    """Costs of the stages of one pipeline, in seconds; all replicas cost the same."""

    forward: Sequence[Sequence[float]]  # by stage and micro-batch, on a rank that computes alone
    backward: Sequence[Sequence[float]]  # likewise
    features: Sequence[float]  # of the transfer from stage i to i + 1, where ranks differ, by i
    gradients: Sequence[float]  # of the transfer from stage i + 1 back to i, by i
    dispatch: float  # what every forward or backward needs in addition
    reduce: Sequence[float]  # of adding up gradients over the replicas, by stage
    update: Sequence[float]  # of all that is done once a step, by the rank's position


def simulate(
    orders: Orders,
    costs: StageCosts,
    num_replicas: int = 1,
    slowdown: Sequence[float] | None = None,
    ranks_per_host: int | None = None,
    *,
    reduce_before_send: bool = False,
    ahead: float = 0,
    distinct: bool = False,
) -> list[Span]:
    """Simulate a training step: every rank's spans, from 0 to its end without gap or overlap.

    Hosts are filled in the order of ranks; one has all if ranks_per_host is None. A stage's
    gradients are added up after the rank's last action, or, with reduce_before_send, inside its
    last backward, before the gradient of its input leaves (as DDP does). A rank asks for so many
    messages of a kind `ahead` of their actions: 0, 1 (the next one, when it gets to an action), or
    infinity. If `distinct`, replicas that do the same as the first one are left out. ValueError is
    raised if ranks wait for one another and never end.
    """
    num_ranks = len(orders)
    simulated = num_simulated(num_ranks, num_replicas, slowdown, ranks_per_host)
    programs = [
        _program(orders, position, costs, num_replicas > 1, reduce_before_send, ahead)
        for position in range(num_ranks)
    ] * simulated
    host_size = min(ranks_per_host or len(programs), len(programs))
    copies = 1  # ranks of its host that each simulated rank stands for
    if simulated < num_replicas:
        copies = (ranks_per_host or num_ranks * num_replicas) // num_ranks or 1
    factors = [stretch(slowdown, n * copies) for n in range(host_size + 1)]
    spans = Simulation(programs, num_ranks, factors, host_size, ahead == math.inf).spans()
    if distinct or simulated == num_replicas:
        return spans
    return [
        span._replace(rank=span.rank + replica_index * num_ranks)
        for replica_index in range(num_replicas)
        for span in spans
    ]


def num_simulated(
    num_ranks: int,
    num_replicas: int,
    slowdown: Sequence[float] | None,
    ranks_per_host: int | None,
) -> int:
    """Count the replicas to simulate: one where all share their hosts in the same way, or all."""
    if slowdown is None or ranks_per_host is None or num_ranks % ranks_per_host == 0:
        return 1
    replicas_per_host, rest = divmod(ranks_per_host, num_ranks)
    return 1 if rest == 0 and num_replicas % replicas_per_host == 0 else num_replicas


def stretch(slowdown: Sequence[float] | None, num_computing: int) -> float:
    """Return how many times longer an action takes while so many ranks of its host compute."""
    if slowdown is None or num_computing == 0:
        return 1.0
    if num_computing <= len(slowdown):
        return slowdown[num_computing - 1]
    return slowdown[-1] * num_computing / len(slowdown)  # they take turns


def bubble(spans: Sequence[Span]) -> float:
    """Compute the bubble: the share of the schedule in which ranks wait.

    The schedule lasts from the first start to the last end of a backward over all ranks; a rank
    that has ended its own last backward counts as waiting until then, whatever it does meanwhile.
    With equal stages the bubble is (S - 1) / (M + S - 1).
    """
    last_backward: dict[int, float] = {}
    for span in spans:
        if span.kind == "backward":
            last_backward[span.rank] = max(span.end, last_backward.get(span.rank, 0.0))
    if not last_backward:
        return 0.0
    end = max(last_backward.values())
    duration = end - min(span.start for span in spans)
    waits = sum(end - rank_end for rank_end in last_backward.values())
    waits += sum(
        span.seconds
        for span in spans
        if span.kind in WAITING and span.end <= last_backward.get(span.rank, 0.0)
    )
    return waits / (duration * len(last_backward)) if duration else 0.0


def _program(
    orders: Orders,
    position: int,
    costs: StageCosts,
    reduces: bool,
    reduce_before_send: bool,
    ahead: float,
) -> list[Operation]:
    num_ranks, num_stages, num_microbatches = len(orders), len(costs.forward), len(costs.forward[0])
    alone = num_ranks == 1
    left = {stage: num_microbatches for stage in range(position, num_stages, num_ranks)}
    program: list[Operation] = []
    for kind, stage, microbatch in orders[position]:
        # Forward m of a stage gives message 2 * (stage * M + m), its backward the next number.
        message = 2 * (stage * num_microbatches + microbatch)
        if kind == "forward":
            seconds = costs.forward[stage][microbatch] + costs.dispatch
            received = not alone and stage > 0
            needs = message - 2 * num_microbatches if received else -1
            transfer = costs.features[stage - 1] if received else 0.0
            gives = message
        else:
            seconds = costs.backward[stage][microbatch] + costs.dispatch
            received = not alone and stage < num_stages - 1
            needs = message + 1 + 2 * num_microbatches if received else -1
            transfer = costs.gradients[stage] if received else 0.0
            gives = message + 1
            left[stage] -= 1
        asks = needs + 2 if ahead == 1 and received and microbatch + 1 < num_microbatches else -1
        operation = Operation(kind, stage, microbatch, seconds, needs, transfer, gives, asks=asks)
        if kind == "backward" and reduces and reduce_before_send and left[stage] == 0:
            summing = Operation(
                "all-reduce", stage, -1, costs.reduce[stage], gives=gives, meeting=stage
            )
            program += [operation._replace(gives=-1), summing]
        else:
            program.append(operation)
    if reduces and not reduce_before_send:
        seconds = sum(costs.reduce[stage] for stage in left)
        program.append(Operation("all-reduce", -1, -1, seconds, meeting=position))
    if costs.update[position]:
        program.append(Operation("optimizer", -1, -1, costs.update[position]))
    return program
