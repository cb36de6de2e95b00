"""The study's claims against the numbers: what held and what did not, in sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vigpipe.study.configs import SEQUENTIAL, baseline, ceiling, name_of
from vigpipe.study.outcome import Outcome

REPORTED_SPEEDUP = 1.96  # of 2 stages and 5 micro-batches, as the study's text has it
_TWO_STAGES, _ACCUMULATED = "2x5", "accumulated-5"
_ENOUGH = 0.95  # of a published ratio counts as the same
_SAME_LOSS = 1e-5  # relative: what sums in another order leave of float32
_NEGLIGIBLE = 0.02  # of a step


@dataclass(frozen=True)
class Verdict:
    """A claim and what became of it.

    Attributes:
        held: None where the layouts that it is about were not run.
        text: sentences.
    """

    held: bool | None
    text: str


def two_paragraphs(outcome: Outcome) -> str:
    """What held, and what did not; Markdown."""
    verdicts = [
        speedup(outcome),
        loss_of_stages(outcome),
        loss_of_microbatches(outcome),
        synchronisation(outcome),
    ]
    held = [v.text for v in verdicts if v.held]
    failed = [v.text for v in verdicts if v.held is False]
    missing = [v.text for v in verdicts if v.held is None]
    parts = [
        "**What held.** " + (" ".join(held) or "None of the claims that were looked at."),
        "**What did not hold.** " + (" ".join(failed) or "None of the claims that were looked at."),
    ]
    if missing:
        parts.append("**Not looked at.** " + " ".join(missing))
    return "\n\n".join(parts)


def speedup(outcome: Outcome) -> Verdict:
    """The 1.96× of two stages with five micro-batches, and what it is made of."""
    claim = f"*{REPORTED_SPEEDUP}× with two stages and 5 micro-batches*"
    whole = outcome.ratios(_TWO_STAGES, SEQUENTIAL)
    if not whole:
        return Verdict(None, f"{claim}: needs the layouts {SEQUENTIAL} and {_TWO_STAGES}.")
    held = median(whole) >= _ENOUGH * REPORTED_SPEEDUP
    text = (
        f"{claim}: here they are {_times(whole)} as fast as the whole mini-batch on one stage"
        f"{_crowd(outcome, _TWO_STAGES, SEQUENTIAL)}, which is "
        f"{'as much or more' if held else 'less'}."
    )
    cuts, pipes = (
        outcome.ratios(_ACCUMULATED, SEQUENTIAL),
        outcome.ratios(_TWO_STAGES, _ACCUMULATED),
    )
    if not cuts:
        return Verdict(held, f"{text} What it is made of, {_ACCUMULATED} would show.")
    most = ceiling(outcome.layouts[_TWO_STAGES])
    text += (
        " It is a product of two. The same 5 micro-batches one after another on one stage, where "
        f"nothing is pipelined, are {_times(cuts)} as fast as the whole mini-batch: that is what "
        "features that are small enough to stay in the cache do. Two stages on top of that are "
        f"{_times(pipes)} as fast, and equal stages cannot be more than {most:.2f}×."
    )
    cut, pipe = median(cuts), median(pipes)
    if cut > 1 and pipe > 1:
        share = math.log(cut) / math.log(cut * pipe)
        text += (
            f" So smaller micro-batches make {share:.0%} of it and pipelining {1 - share:.0%} "
            "(of the logarithm)."
        )
    if cut <= 1:
        text += " So smaller micro-batches alone gain nothing here."
    if pipe <= 1:
        text += " So pipelining gains nothing here."
    if pipe > most:
        text += (
            " The second is beyond that: the two stages have more cache between them, or the "
            "machine was not equally busy."
        )
    return Verdict(held, text)


def loss_of_stages(outcome: Outcome) -> Verdict:
    """Whether splitting the model leaves the loss of the same micro-batches as it is."""
    claim = "*The loss does not depend on stages and copies*"
    stages: dict[str, float] = {}
    copies: dict[str, float] = {}
    for name, layout in outcome.layouts.items():
        base = name_of(baseline(layout))
        if layout.world_size > 1 and base in outcome.runs:
            into = copies if layout.num_replicas > 1 else stages
            into[name] = difference(outcome, name, base)[0]
    if not stages and not copies:
        return Verdict(None, f"{claim}: needs a split layout and its accumulated baseline.")
    compared = {
        "pipelines": stages,
        "copies": copies,
    }
    told = "; ".join(
        f"{what} ({', '.join(found)}): {_distance(max(found.values()))}"
        for what, found in compared.items()
        if found
    )
    held = max([*stages.values(), *copies.values()]) <= _SAME_LOSS
    text = (
        f"{claim}: against the unsplit model on the same micro-batches, over {_steps(outcome)}, "
        f"{told}."
    )
    if not held:
        text += f" That is more than the {_SAME_LOSS:.0e} that another order of sums explains."
    return Verdict(held, text)


def loss_of_microbatches(outcome: Outcome) -> Verdict:
    """Whether cutting the mini-batch leaves the loss as it is."""
    claim = "*Micro-batches leave the loss unaffected*"
    found = {
        name: difference(outcome, name, SEQUENTIAL)
        for name, layout in outcome.layouts.items()
        if SEQUENTIAL in outcome.runs and layout.num_microbatches * layout.num_replicas > 1
    }
    if not found:
        return Verdict(None, f"{claim}: needs {SEQUENTIAL} and a layout with micro-batches.")
    name = max(found, key=lambda name: found[name][0])
    largest, step, last = found[name]
    held = largest <= _SAME_LOSS
    text = (
        f"{claim}: against the whole mini-batch the largest relative difference is "
        f"{_relative(largest)}, of {name} at step {step}; at the last step it is {_relative(last)} "
        "there."
    )
    if not held:
        text += (
            " BatchNorm takes its statistics from a micro-batch, so smaller ones make another "
            "model; stages have no part in it."
        )
    return Verdict(held, text)


def synchronisation(outcome: Outcome) -> Verdict:
    """Whether adding gradients up over the copies is a negligible part of a step."""
    claim = "*Synchronising gradients is negligible*"
    shares: dict[str, tuple[float, float, float]] = {}
    for name, layout in outcome.layouts.items():
        if layout.num_replicas > 1:
            step = median(outcome.pooled_seconds(name, "train"))
            least, most = (
                median(run.all_reduce_seconds[i] for run in outcome.runs[name]) for i in (0, 1)
            )
            shares[name] = least / step, least, most / step
    if not shares:
        return Verdict(None, f"{claim}: needs a layout with copies, such as 2x2x5.")
    name = max(shares, key=lambda name: shares[name])
    share, least, most = shares[name]
    simulated = outcome.predictions[name]
    apart = simulated.all_reduce_seconds / simulated.apart_seconds
    is_crowded = outcome.is_crowded(name)
    text = (
        f"{claim}: adding gradients up takes {1e3 * least:.2f} ms of a step of {name}, "
        f"{share:.2%}, on the copy that comes last and waits for nobody; the copy that comes first "
        f"spends {most:.2%} there. Simulated with cores for every rank it is "
        f"{1e3 * simulated.all_reduce_seconds:.2f} ms, {apart:.2%}. Less than {_NEGLIGIBLE:.0%} "
        "counts as negligible"
    )
    if is_crowded:
        text += (
            f", and the simulated share decides, because {outcome.layouts[name].world_size} ranks "
            f"on {_cores(outcome)} also wait for a core there"
        )
    return Verdict((apart if is_crowded else share) < _NEGLIGIBLE, f"{text}.")


def difference(outcome: Outcome, name: str, other: str) -> tuple[float, int, float]:
    """Of the losses of two layouts, relative to the second's, over all rounds.

    Returns:
        The largest, its step, and the one at the last step.
    """
    most: dict[int, float] = {}
    for own, its in zip(outcome.runs[name], outcome.runs[other], strict=True):
        for step, relative in relative_differences(own.losses, its.losses).items():
            most[step] = max(relative, most.get(step, 0.0))
    where = max(most, key=lambda step: most[step])
    return most[where], where, most[max(most)]


def relative_differences(
    losses: Mapping[int, float], others: Mapping[int, float]
) -> dict[int, float]:
    """|a - b| / |b| by step."""
    return {
        step: abs(losses[step] - other) / abs(other) if losses[step] != other else 0.0
        for step, other in others.items()
    }


def _times(ratios: Sequence[float]) -> str:
    spread = f" ({min(ratios):.2f} – {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}×{spread}"


def _distance(largest: float) -> str:
    return f"at most {_relative(largest)} apart" if largest else "equal bit for bit"


def _relative(difference: float) -> str:
    return f"{difference:.1%}" if difference >= 0.001 else f"{difference:.1e}"


def _steps(outcome: Outcome) -> str:
    number = len(next(iter(outcome.runs.values()))[0].losses)
    rounds = f" of {outcome.num_rounds} rounds" if outcome.num_rounds > 1 else ""
    return f"{number} steps{rounds}"


def _crowd(outcome: Outcome, name: str, other: str) -> str:
    if not outcome.is_crowded(name):
        return ""
    return (
        f" (they share {_cores(outcome)}; simulated "
        f"with cores for every rank: {outcome.simulated_ratio(name, other):.2f}×)"
    )


def _cores(outcome: Outcome) -> str:
    return f"{outcome.num_cores} core{'s' if outcome.num_cores > 1 else ''}"
