"""Decide from measured throughput whether more or fewer replicas would pay.

Two rules judge readings of throughput in their order, and `predict` judges what replicas did with
their time. All are plain functions: they only decide.

    published    the last 10 readings are flat: one more
    safer        5 readings before a change, 5 after it: keep it, or go back
    predict      seconds of work, waiting and averages of one run: one more, one fewer

For the last two, a replica pays if it brings 0.5 / p of the throughput: half of what one of p
replicas brings if they cost one another nothing. Throughput is in images/s, or in nodes/s, of all
replicas together.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

from vigpipe.job.rows import RATE
from vigpipe.replication.metrics import accounted_seconds, samples_per_second

MOST = 16  # no rule asks for more replicas
FLAT = 0.05  # a gain that is smaller counts as none
WINDOW = 5  # number of readings in a mean
HOLD_OFF = 20  # number of readings after going back, before more replicas are tried again


class Reading(NamedTuple):
    """The throughput with a number of replicas."""

    num_replicas: int
    per_second: float


class Advice(NamedTuple):
    """What a rule says."""

    num_replicas: int  # to have from now on
    why: str  # one sentence, with the numbers


def published(readings: Sequence[float], num_replicas: int) -> Advice:
    """Decide by the published rule: one more replica when throughput has stopped growing.

    With at least 10 readings, the gain is that of the last 5 over the 5 before. If it is less than
    5 %, and there are fewer than 16 replicas, add one. All readings are with `num_replicas`.

    The pitfall: throughput is flat whenever nothing changes, so a flat curve does not mean that
    more replicas help. The rule never looks whether one helped, or removes it; `safer` does.
    """
    if len(readings) < 2 * WINDOW:
        why = f"Readings so far: {len(readings)}; the rule needs {2 * WINDOW}."
        return Advice(num_replicas, why)
    gain = _gain(readings[-2 * WINDOW : -WINDOW], readings[-WINDOW:])
    if gain is None:
        why = f"Nothing can be compared with a throughput of 0, as in the {WINDOW} before the last."
        return Advice(num_replicas, why)
    why = f"The last {WINDOW} readings differ by {percent(gain)} from the {WINDOW} before"
    flat = percent(FLAT, sign=False)
    if gain >= FLAT:
        return Advice(num_replicas, f"{why}: throughput still grows by {flat} or more.")
    if num_replicas >= MOST:
        return Advice(num_replicas, f"{why}, which is flat, but {MOST} replicas are the most.")
    return Advice(num_replicas + 1, f"{why}, less than {flat}: one more replica.")


def safer(history: Sequence[Reading]) -> Advice:
    """Decide by all readings, at least one: try one more replica, and keep only what pays.

    A change from p to q replicas is judged by the last 5 readings before it and the last 5 since.
    More are kept if throughput rose by at least 0.5 / p for each one added, fewer if it fell by
    less than that for each one removed; else the run goes back to p. With fewer than 5 readings
    since the start or a change, wait. After a change upwards that paid, or without any change, try
    one more. A change that undoes the one before is going back: then hold off for 20 readings, and
    try one more.
    """
    stretches = [
        (number, [reading.per_second for reading in readings])
        for number, readings in groupby(history, lambda reading: reading.num_replicas)
    ]
    now, since = stretches[-1]
    if _went_back([number for number, _ in stretches]):
        why = f"Readings since the run went back from {stretches[-2][0]} to {now}: {len(since)}"
        if len(since) < HOLD_OFF:
            return Advice(now, f"{why}; no change before {HOLD_OFF}.")
        return _try_one_more(now, f"{why}.")
    if len(since) < WINDOW:
        what = f"since the change to {now}" if len(stretches) > 1 else "so far"
        return Advice(now, f"Readings {what}: {len(since)}; a change is judged by {WINDOW}.")
    if len(stretches) == 1:
        return _try_one_more(now, "The number of replicas was never changed.")
    before, old = stretches[-2]
    gain, needed = _gain(old[-WINDOW:], since[-WINDOW:]), 0.5 / before * (now - before)
    if gain is None:
        why = f"Nothing can be compared with a throughput of 0, as with {before} replicas."
        return Advice(now, why)
    why = f"From {before} to {now} replicas throughput changed by {percent(gain)}"
    if now > before and gain >= needed:
        return _try_one_more(now, f"{why}, at least {percent(needed)}: keep {now}.")
    if now > before:
        return Advice(before, f"{why}, less than {percent(needed)}: go back to {before}.")
    lost = percent(-needed, sign=False)
    if gain > needed:
        return Advice(now, f"{why}, a loss of less than {lost}: keep {now}.")
    return Advice(before, f"{why}, a loss of {lost} or more: go back to {before}.")


class Prediction(NamedTuple):
    """Measured throughput of all replicas, in samples/s, and what another number would make of it.

    With one replica, `with_one_fewer` is None. Samples are images, or training nodes.
    """

    num_replicas: int
    per_second: float
    with_one_more: float
    with_one_fewer: float | None
    samples: str = "images"

    @property
    def needed(self) -> float:
        """The share of throughput that one replica must bring to pay."""
        return 0.5 / self.num_replicas

    @property
    def gain(self) -> float:
        """The share of throughput that one more would bring."""
        return self.with_one_more / self.per_second - 1

    @property
    def loss(self) -> float | None:
        """The share of throughput that one fewer would cost."""
        if self.with_one_fewer is None:
            return None
        return 1 - self.with_one_fewer / self.per_second

    @property
    def more_pays(self) -> bool:
        return self.gain >= self.needed

    @property
    def fewer_pays(self) -> bool:
        return self.loss is not None and self.loss < self.needed

    def as_table(self) -> dict[str, Any]:
        """Return the entry of summary.json."""
        return {
            self.samples.replace(" ", "_") + RATE: self.per_second,
            "with_one_more": self.with_one_more,
            "with_one_fewer": self.with_one_fewer,
            "more_pays": self.more_pays,
            "fewer_pays": self.fewer_pays,
        }


def predict(
    each: Sequence[Mapping[str, float]],
    server: Mapping[str, float] | None = None,
    *,
    averages_all: bool = True,
    samples: str = "images",
) -> Prediction | None:
    """Predict throughput with one replica more and with one fewer.

    Assumed: each replica has cores or a GPU of its own; an item takes as long as now; a replica
    waits as long for an item as now. A new replica is like the mean of the others.

    - An average of all sends 2 (D - 1) / D of the weights from each of D replicas, as a ring does,
      and takes time in proportion. An average of a pair takes as long as now.
    - A replica that is left alone averages with nobody, and waits for nobody.
    - A server can do no more than throughput now / (1 - share of its time that it waits). Workers
      wait for it in that share of their waits in which it is busy; with one fewer, they do not.

    The tables of replicas and server are those of `summarize_replicas`; for `samples` see
    `vigpipe.job.rows.trained_on`. Return None if nothing was trained, or if there is one replica
    and no server, which does not show how long an average takes.
    """
    now = sum(map(samples_per_second, each))
    num = len(each)
    if now <= 0 or (num == 1 and server is None):
        return None

    def rate(waits: float = 1.0, averages: float = 1.0) -> float:
        """Return samples/s of the mean replica, its waits and averages multiplied by these."""
        return fmean(
            samples_per_second(
                {
                    **replica,
                    "waiting_seconds": waits * replica["waiting_seconds"],
                    "averaging_seconds": averages * replica["averaging_seconds"],
                }
            )
            for replica in each
        )

    if server is not None:
        idle = server["waiting_seconds"] / (sum(accounted_seconds(server)) or 1.0)
        more = (num + 1) * rate()
        if idle < 1:
            more = min(more, now / (1 - idle))
        fewer = min((num - 1) * rate(waits=idle), now) if num > 1 else None
        return Prediction(num, now, more, fewer, samples)

    def traffic(num_replicas: int) -> float:
        """Return the time of an average of this many replicas, relative to one of all now."""
        share = 2 * (num_replicas - 1) / num_replicas
        return share / (2 * (num - 1) / num) if averages_all else 1.0

    more = (num + 1) * rate(averages=traffic(num + 1))
    alone = num == 2
    fewer = (num - 1) * (rate(0, 0) if alone else rate(averages=traffic(num - 1)))
    return Prediction(num, now, more, fewer, samples)


def sentences(prediction: Prediction) -> list[str]:
    """Say what a prediction means for one more replica, and for one fewer if there are several."""
    now, needed = prediction.per_second, percent(prediction.needed, sign=False)
    told = [
        f"One more replica would give about {prediction.with_one_more:,.0f} {prediction.samples}/s "
        f"instead of {now:,.0f} ({percent(prediction.gain)}): it "
        f"{'pays' if prediction.more_pays else 'does not pay'}, for {needed} is what it must bring."
    ]
    if prediction.with_one_fewer is not None and prediction.loss is not None:
        told.append(
            f"One fewer would give about {prediction.with_one_fewer:,.0f} {prediction.samples}/s "
            f"({percent(-prediction.loss)}): it "
            f"{'pays' if prediction.fewer_pays else 'does not pay'}, for it "
            f"{'costs' if prediction.fewer_pays else 'must cost'} less than {needed}."
        )
    return told


def percent(share: float, *, sign: bool = True) -> str:
    """Write a share of 1 as a percentage."""
    return (f"{share:+.1%}" if sign else f"{share:.1%}").replace("-", "−")


def _gain(old: Sequence[float], new: Sequence[float]) -> float | None:
    """Return by which share the mean grew; None if the old mean is not above 0."""
    before = fmean(old)
    return (fmean(new) - before) / before if before > 0 else None


def _went_back(numbers: Sequence[int]) -> bool:
    """Whether the last change undid the one before, which did not itself undo another."""
    undoes = False
    for i in range(2, len(numbers)):
        undoes = not undoes and numbers[i] == numbers[i - 2]
    return undoes


def _try_one_more(now: int, why: str) -> Advice:
    if now >= MOST:
        return Advice(now, f"{why} {now} replicas are the most.")
    return Advice(now + 1, f"{why} Try {now + 1}, and see whether it pays.")
