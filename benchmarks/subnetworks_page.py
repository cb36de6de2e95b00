"""The page of `python -m benchmarks subnetworks`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.options import SubnetworksBench
from benchmarks.subnetworks_outcome import Outcome
from benchmarks.trained import PEAK, Table

POINTS = 3  # of accuracy, by which sub-networks may be worse than the model as a whole
# Claims about GIST (arXiv:2102.10424), by what is set beside them. The numbers of cells are only in
# its figures.
PUBLISHED = {
    "each": (
        "Reddit, GraphSAGE and GAT, m = 2, 4, 8: F1 matches or exceeds that of one GPU, and the "
        "training time is clearly lower"
    ),
    "wide": (
        "Amazon2M, width 400 and 4,096: comparable F1, significantly faster; the time of one GPU "
        "becomes prohibitive as the width grows"
    ),
    "ultra-wide": (
        "GraphSAGE of width 32,768 trains on Amazon2M with m up to 8; one GPU runs out of memory "
        "well below"
    ),
    "untrained": (
        "expected, not published: with too few rounds, a share (1 - 1/m)^R of the hidden weights "
        "keeps its initial values, and accuracy is lost"
    ),
}
_FIRST = ("layers", "sampler", "m", "variant")
_ELSEWHERE = "`python -m benchmarks widths`"
_MIB = 2**20

Group = Mapping[tuple[object, ...], Sequence[Outcome]]  # the seeds of each case


def page_of(
    options: SubnetworksBench, found: Sequence[Outcome], folder: Path
) -> tuple[str, list[Table]]:
    """Return the question in words, and the tables; see `trained.Question`."""
    cases = _grouped(found, lambda run: run[: run._fields.index("seed")])
    bases = {_trained(runs[0]): runs for runs in cases.values() if runs[0].replicas == 1}
    intervals = list(dict.fromkeys(run.every for run in found if run.replicas > 1))
    title = f"Steps of a round: {intervals[0]}" if intervals else ""
    first = [runs for runs in cases.values() if runs[0].every in (0, *intervals[:1])]
    headers = [*_FIRST, "test accuracy", "points to m = 1", f"within {POINTS}"]
    headers += ["sub-models alone", "s a step", "s of training", "MB sent, a replica and round"]
    headers += ["peak memory a rank", "rounds", "never trained"]
    tables = [Table(title, headers, [_row(runs, bases[_trained(runs[0])]) for runs in first])]
    if len(intervals) > 1:
        headers = [*_FIRST, "steps of a round", "rounds", "never trained"]
        headers += ["test accuracy", "points to m = 1", "s of training"]
        several = [runs for runs in cases.values() if runs[0].replicas > 1]
        by_steps = [_of_interval(runs, bases[_trained(runs[0])]) for runs in several]
        tables.append(Table("By the steps of a round", headers, by_steps))
    rows = [(claim, here) for claim, here in _claims(cases, bases).items()]
    title = "What was published, and what was found here"
    tables.append(Table(title, ["published", "here"], rows))
    width = "" if options.width is None else f", width {options.width:,}"
    words = (
        f"{options.model}{width} on {options.data}, trained as a whole (m = 1) and as m "
        "independent sub-networks, which together take as many epochs. The test accuracy is that "
        "of the wide model at the epoch with the best validation accuracy; with sub-networks it is "
        "evaluated between two rounds only, so less often. The accuracy of the sub-models alone is "
        f"that at the end. Seeds: {options.seeds}; ± is the standard deviation over them. Seconds "
        "of a step are the median of the slowest replica's, with its data; those of training are "
        "what it has worked, waited and exchanged slices, without evaluations. All replicas share "
        f"the cores of one host. {PEAK} Never trained is the expected share (1 - 1/m)^R of the "
        "weights between two divided layers after R rounds; a model of two layers may have no such "
        "weights."
    )
    return words, tables


def _grouped(found: Sequence[Outcome], key: Callable[[Outcome], tuple[object, ...]]) -> Group:
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for run in found:
        groups.setdefault(key(run), []).append(run)
    return groups


def _trained(run: Outcome) -> tuple[object, ...]:
    """Return what is trained, however it is divided."""
    return run[: run._fields.index("replicas")]


def _row(found: Sequence[Outcome], base: Sequence[Outcome]) -> list[str]:
    one = found[0]
    row = [*_first_cells(one), _spread([100 * run.accuracy for run in found], " %")]
    own = [100 * run.own_accuracy for run in found if run.own_accuracy is not None]
    sent = [run.round_bytes / 1e6 for run in found if run.round_bytes is not None]
    points = _points(found, base)
    is_within = fmean(points) >= -POINTS
    row += [_signed(points), "yes" if is_within else "no"] if one.replicas > 1 else ["", ""]
    row += [_spread(own, " %") if own else "", _spread([run.step_seconds for run in found], "", 4)]
    row += [_spread([run.seconds for run in found]), f"{fmean(sent):,.3f}" if sent else ""]
    peaks = [run.peak_bytes / _MIB for run in found]
    row += [_spread(peaks, " MiB", 0), *_rounds(one)]
    return row


def _of_interval(found: Sequence[Outcome], base: Sequence[Outcome]) -> list[str]:
    one = found[0]
    accuracy = _spread([100 * run.accuracy for run in found], " %")
    row = [*_first_cells(one), str(one.every), *_rounds(one), accuracy]
    return [*row, _signed(_points(found, base)), _spread([run.seconds for run in found])]


def _first_cells(one: Outcome) -> list[str]:
    layers = "" if one.layers is None else str(one.layers)
    return [layers, one.sampler, str(one.replicas), one.variant]


def _rounds(one: Outcome) -> list[str]:
    if one.rounds is None:
        return ["", ""]
    return [str(one.rounds), "–" if one.untrained is None else f"{one.untrained:.2%}"]


def _points(found: Sequence[Outcome], base: Sequence[Outcome]) -> list[float]:
    """Return how much better than the model as a whole they are, in points, seed by seed."""
    pairs = zip(found, base, strict=True)
    # Rounded, so that a difference of exactly POINTS is within them.
    return [round(100 * (run.accuracy - of.accuracy), 9) for run, of in pairs]


def _faster(found: Sequence[Outcome], base: Sequence[Outcome]) -> float:
    return fmean(run.seconds for run in base) / fmean(run.seconds for run in found)


def _spread(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    spread = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):,.{digits}f}{spread}{unit}"


def _signed(points: Sequence[float]) -> str:
    spread = f" ± {stdev(points):.2f}" if len(points) > 1 else ""
    return f"{fmean(points):+.2f}{spread}"


def _claims(cases: Group, bases: Mapping[tuple[object, ...], Sequence[Outcome]]) -> dict[str, str]:
    """Return what was found, by the claim that it is set beside."""
    several = [(runs, bases[_trained(runs[0])]) for runs in cases.values()]
    several = [pair for pair in several if pair[0][0].replicas > 1]
    each: list[str] = []
    for m in dict.fromkeys(runs[0].replicas for runs, _ in several):
        of_m = [pair for pair in several if pair[0][0].replicas == m]
        points, faster = [fmean(_points(*pair)) for pair in of_m], [_faster(*p) for p in of_m]
        within = sum(value >= -POINTS for value in points)
        each.append(
            f"m = {m}: {min(points):+.2f} to {max(points):+.2f} points, {within} of {len(points)} "
            f"cases within {POINTS}; {min(faster):.2f} to {max(faster):.2f} times as fast"
        )
    shares = [
        (runs[0].untrained, f"{runs[0].untrained:.2%}, {_signed(_points(runs, base))} points")
        for runs, base in several
        if runs[0].untrained is not None
    ]
    found = {"each": "; ".join(each), "wide": _ELSEWHERE, "ultra-wide": _ELSEWHERE}
    if shares:
        least, most = min(shares)[1], max(shares)[1]
        found["untrained"] = f"smallest share: {least}; largest: {most}"
    return {claim: found.get(name, "") for name, claim in PUBLISHED.items()}
