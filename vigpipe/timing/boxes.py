"""Say how the boxes of a timeline look, in the picture of a step and in the report's chart.

A kind of span has a colour. Where ranks hold several stages each, a rank's later stages are paler:

    rank 0   [forward 0, s0][forward 1, s0][paler: forward 0, s2][paler: forward 1, s2]
    rank 1                  [forward 0, s1][forward 1, s1       ][paler: forward 0, s3]
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vigpipe.spans import COMPUTE, KINDS, Span, SpanKind

# Okabe and Ito's colours, told apart by colour-blind readers too; waiting stays in the background.
COLOURS: dict[SpanKind, str] = {
    "forward": "#56b4e9",
    "backward": "#009e73",
    "wait input": "#f0f0f0",
    "wait gradient": "#cccccc",
    "wait end": "#a6a6a6",
    "send": "#f0e442",
    "all-reduce": "#d55e00",
    "optimizer": "#cc79a7",
    "other": "#7d7d7d",
}
# Greys in small boxes are hard to tell apart by their shade alone.
HATCHES: Mapping[str, str] = {"wait input": "/", "wait gradient": "\\", "wait end": "."}
_KEPT = 0.55  # how much of its colour the next stage of a rank keeps


class Look(NamedTuple):
    """How boxes look."""

    name: str  # in a legend
    kind: SpanKind
    colour: str  # #rrggbb
    hatch: str  # what matplotlib and plotly call the pattern; empty for none


def places_of_stages(spans: Iterable[Span]) -> dict[int, int]:
    """Return, for every stage, its place among the stages of its rank: 0 for the first."""
    stages: dict[int, set[int]] = {}
    for span in spans:
        if span.kind in COMPUTE and span.stage >= 0:
            stages.setdefault(span.rank, set()).add(span.stage)
    return {stage: i for of_rank in stages.values() for i, stage in enumerate(sorted(of_rank))}


def by_look(spans: Iterable[Span], places: Mapping[int, int]) -> dict[Look, list[Span]]:
    """Group spans of a step by how they look, in the order of KINDS, a rank's first stage first.

    Places come from `places_of_stages`, called with all steps that are drawn together.
    """
    groups: dict[tuple[SpanKind, int], list[Span]] = {}
    for span in spans:
        place = places.get(span.stage, 0) if span.kind in COMPUTE else 0
        groups.setdefault((span.kind, place), []).append(span)
    ordered = sorted(groups, key=lambda key: (KINDS.index(key[0]), key[1]))
    return {_look(kind, place, places): groups[kind, place] for kind, place in ordered}


def label(span: Span, places: Mapping[int, int]) -> list[str]:
    """Return the lines of text in a box: the micro-batch and, where ranks hold several, the stage.

    Boxes that are not about a micro-batch have none.
    """
    if span.kind not in COMPUTE or span.microbatch < 0:
        return []
    return [str(span.microbatch), *([f"s{span.stage}"] if any(places.values()) else [])]


def explanation(places: Mapping[int, int]) -> str:
    """Explain the text in the boxes in one sentence or two."""
    numbers = "The number in a box is the micro-batch"
    if not any(places.values()):
        return f"{numbers}; a box that is too narrow has none."
    return (
        f"{numbers}, with the stage below it (s1 is stage 1); a box that is too narrow has none. "
        "A rank holds several stages, the later ones paler."
    )


def _look(kind: SpanKind, place: int, places: Mapping[int, int]) -> Look:
    name: str = kind
    if kind in COMPUTE and any(places.values()):
        stages = [stage for stage, own in places.items() if own == place]
        first, last = min(stages), max(stages)
        name += f", stage {first}" if first == last else f", stages {first}–{last}"
    return Look(name, kind, _paler(COLOURS[kind], place), HATCHES.get(kind, ""))


def _paler(colour: str, place: int) -> str:
    kept = _KEPT**place
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - kept * (255 - part)):02x}" for part in parts)
