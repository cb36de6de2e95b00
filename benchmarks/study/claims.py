"""Hold the study's claims against the measured numbers, and say which hold, in sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.study.configs import SEQUENTIAL, baseline, ceiling, name_of
from benchmarks.study.outcome import Outcome

REPORTED_SPEEDUP = 1.96  # of 2 stages and 5 micro-batches, in the study's text
_TWO_STAGES, _ACCUMULATED = "2x5", "accumulated-5"
_ENOUGH = 0.95  # share of a published ratio that counts as equal to it
_SAME_LOSS = 1e-5  # relative difference in float32 that another order of summing explains
_NEGLIGIBLE = 0.02  # share of a step that counts as negligible


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim of the study."""

    held: bool | None  # whether the claim held; None if the layouts that it is about were not run
    text: str  # the claim and the evidence, in sentences


def two_paragraphs(outcome: Outcome) -> str:
    """Write which claims held, which did not, and which could not be checked, as Markdown."""
    verdicts = [
        speedup(outcome),
        loss_of_stages(outcome),
        loss_of_microbatches(outcome),
        synchronisation(outcome),
    ]
    held = [v.text for v in verdicts if v.held]
    failed = [v.text for v in verdicts if v.held is False]
    missing = [v.text for v in verdicts if v.held is None]
    paragraphs = [
        "**What held.** " + (" ".join(held) or "None of the claims that were looked at."),
        "**What did not hold.** " + (" ".join(failed) or "None of the claims that were looked at."),
    ]
    if missing:
        paragraphs.append("**Not looked at.** " + " ".join(missing))
    return "\n\n".join(paragraphs)


def speedup(outcome: Outcome) -> Verdict:
    """Check the speed-up of 1.96× of two stages, five micro-batches, and what it consists of."""
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
    """Check that splitting the model does not change the loss of the same micro-batches."""
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
    distances = "; ".join(
        f"{what} ({', '.join(by_name)}): {_distance(max(by_name.values()))}"
        for what, by_name in compared.items()
        if by_name
    )
    held = max([*stages.values(), *copies.values()]) <= _SAME_LOSS
    text = (
        f"{claim}: against the unsplit model on the same micro-batches, over {_steps(outcome)}, "
        f"{distances}."
    )
    if not held:
        text += f" That is more than the {_SAME_LOSS:.0e} that another order of sums explains."
    return Verdict(held, text)


def loss_of_microbatches(outcome: Outcome) -> Verdict:
    """Check whether cutting the mini-batch into micro-batches changes the loss."""
    claim = "*Micro-batches leave the loss unaffected*"
    differences = {
        name: difference(outcome, name, SEQUENTIAL)
        for name, layout in outcome.layouts.items()
        if SEQUENTIAL in outcome.runs and layout.num_microbatches * layout.num_replicas > 1
    }
    if not differences:
        return Verdict(None, f"{claim}: needs {SEQUENTIAL} and a layout with micro-batches.")
    name = max(differences, key=lambda name: differences[name][0])
    largest, step, last = differences[name]
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
    """Check whether adding up the gradients of the copies takes a negligible share of a step."""
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
    """Compare the losses of two layouts over all rounds, relative to those of the second.

    Args:
        outcome: the runs.
        name: name of the first layout.
        other: name of the second layout.

    Returns:
        The largest relative difference, its step, and the difference at the last step.
    """
    most: dict[int, float] = {}
    for run, other_run in zip(outcome.runs[name], outcome.runs[other], strict=True):
        for step, relative in relative_differences(run.losses, other_run.losses).items():
            most[step] = max(relative, most.get(step, 0.0))
    where = max(most, key=lambda step: most[step])
    return most[where], where, most[max(most)]


def relative_differences(
    losses: Mapping[int, float], others: Mapping[int, float]
) -> dict[int, float]:
    """Compute |a - b| / |b| of two losses a and b, by step."""
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
