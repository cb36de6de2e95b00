"""State an interval for a predicted step, from how steady the machine was."""

from dataclasses import replace
from math import exp, hypot, log
from statistics import NormalDist, fmean, stdev

from vigpipe.planning.profile import Profile
from vigpipe.planning.step import Proposal, Request, simulate_step
from vigpipe.schedules import orders
from vigpipe.spans import step_seconds

Interval = tuple[float, float]  # the shortest and the longest step in seconds
SHARE = 0.9  # share of runs whose step should lie inside
# Predictions were off by so much on quiet machines, as a standard deviation of logarithms: a median
# of 2.2 to 2.7 %, 5.5 % at worst (docs/planning.md).
_MODEL_ERROR = 0.03
_LEAST_ROUNDS = 3


def step_interval(profile: Profile, request: Request, proposal: Proposal) -> Interval | None:
    """Return the interval that the step of 9 in 10 runs should lie in; None with too few rounds.

    Every round of the profile says how fast 1, 2, ... ranks were at its time. A step is simulated
    for each of them; the logarithms of its seconds are taken as normally distributed, and those of
    a run to come as one more of them (a prediction interval, with Student's t), to which the error
    of the simulation itself is added.
    """
    num_rounds = len(profile.rounds)
    if num_rounds < _LEAST_ROUNDS:
        return None
    order = orders(
        proposal.schedule, request.num_ranks, proposal.virtual_stages, proposal.num_microbatches
    )

    def simulated(slowdown: tuple[float, ...]) -> float:
        then = replace(profile, slowdown=slowdown)
        costs, schedule = proposal.costs, proposal.schedule
        return step_seconds(simulate_step(then, request, order, costs, schedule, distinct=True))

    logs = [log(simulated(of_round)) for of_round in profile.rounds]
    z = NormalDist().inv_cdf((1 + SHARE) / 2)
    of_rounds = _student(z, num_rounds - 1) * stdev(logs) * (1 + 1 / num_rounds) ** 0.5
    half = hypot(of_rounds, z * _MODEL_ERROR)
    middle, predicted = fmean(logs), proposal.step_seconds
    return min(exp(middle - half), predicted), max(exp(middle + half), predicted)


def interval_text(interval: Interval | None) -> str:
    """Write an interval of seconds in milliseconds; nothing if there is none."""
    return "" if interval is None else "{:.1f} – {:.1f}".format(*(1e3 * s for s in interval))


def _student(z: float, degrees: int) -> float:
    """Return the quantile of Student's t for that of the normal distribution, z.

    Abramowitz and Stegun 1964, 26.7.5, to the third term: within 1.3 % from 2 degrees up.
    """
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
