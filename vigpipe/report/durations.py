"""Make the rows of the tables of durations: stages, parts of the model, and single blocks.

A value is the seconds that something took in one step, all its micro-batches together, on the rank
that took longest, as in the tables that a timed run prints.
"""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from vigpipe.spans import COMPUTE
from vigpipe.timing.tables import DIRECTIONS, OF_RANKS, Key, Statistics, statistics

Seconds = Mapping[Key, list[float]]  # a value for each step, from vigpipe.timing.tables.slowest
Rows = list[tuple[str, str, Statistics]]  # name, direction, statistics

PARTS_OF_BLOCK = {
    "": "block",
    "/grapher": "Grapher",
    "/grapher/knn": "kNN",
    "/grapher/aggregation": "aggregation",
    "/ffn": "FFN",
}
PARTS_OF_LAYER = {"/aggregation": "aggregation", "/update": "update"}  # a graph model's block
COMPARED = ("step", *COMPUTE, "all-reduce", "optimizer")
_BLOCK = re.compile(r"block (\d+)((?:/.*)?)")
_BEFORE, _AFTER = -1, 1 << 30  # indices before and after those of all blocks


def stage_rows(seconds: Seconds) -> Rows:
    """Make a row for the step, for all that is not about a single stage, and for every stage."""
    keys = [key for key in seconds if key[1] in OF_RANKS]
    keys.sort(key=lambda key: (key[0], OF_RANKS.index(key[1])))
    placed = [("all" if key[0] < 0 else f"stage {key[0]}", key[1], key) for key in keys]
    return [(place, name, statistics(seconds[key])) for place, name, key in placed]


def part_rows(seconds: Seconds) -> Rows:
    """Make rows for the stem, one block and its parts (values of all blocks), readout and loss."""
    pooled: dict[tuple[str, str], list[float]] = {}
    for key in _regions(seconds):
        block = _BLOCK.fullmatch(key[1])
        part = _part(block) if block else ""
        name = "one block" if block and not block[2] else part or key[1]
        pooled.setdefault((name, key[2]), []).extend(seconds[key])
    order = ["stem", "one block", *list(PARTS_OF_BLOCK.values())[1:], "update", "readout", "loss"]
    names = sorted(pooled, key=lambda key: order.index(key[0]) if key[0] in order else len(order))
    return [(name, direction, statistics(pooled[name, direction])) for name, direction in names]


def block_rows(seconds: Seconds) -> Rows:
    """Make a row for every single block and for each of its parts."""
    rows: Rows = []
    for key in _regions(seconds):
        block = _BLOCK.fullmatch(key[1])
        if block:
            name = f"block {block[1]}" + (f", {_part(block)}" if block[2] else "")
            rows.append((name, key[2], statistics(seconds[key])))
    return rows


def medians(seconds: Seconds) -> dict[str, float]:
    """Compute the medians that runs are compared by: of the step, stages and parts of the model."""
    rows = [row for row in stage_rows(seconds) if row[1] in COMPARED]
    rows += part_rows(seconds)
    named = {f"{place}, {name}" if name else place: numbers.median for place, name, numbers in rows}
    return {name.removeprefix("all, "): value for name, value in named.items()}


def stacked_medians(seconds: Seconds, direction: str) -> dict[str, dict[str, float]]:
    """Compute the median seconds by part, then by piece of the model, for a stacked chart.

    The parts of a piece add up to its median, unless their own medians exceed it. A piece without
    parts, such as the stem, has the part "whole".
    """
    median_of = {key[1]: float(np.median(seconds[key])) for key in _regions(seconds, {direction})}
    stacked: dict[str, dict[str, float]] = {}
    for piece in [name for name in median_of if "/" not in name]:
        whole = median_of[piece]
        of_layer = {name: median_of.get(piece + p, 0.0) for p, name in PARTS_OF_LAYER.items()}
        inner = {part: median_of.get(piece + part, 0.0) for part in PARTS_OF_BLOCK if part}
        if any(of_layer.values()):
            parts = {**of_layer, "rest of the block": whole - sum(of_layer.values())}
        elif any(inner.values()):
            grapher, knn, aggregation, ffn = inner.values()
            parts = {
                "kNN": knn,
                "aggregation": aggregation,
                "rest of the Grapher": grapher - (knn + aggregation),
                "FFN": ffn,
                "rest of the block": whole - grapher - ffn,
            }
        else:
            parts = {"whole": whole}
        for part, value in parts.items():
            stacked.setdefault(part, {})[piece] = max(value, 0.0)
    return stacked


def has_layers(seconds: Seconds) -> bool:
    """Whether these are the times of a graph model, whose blocks are layers."""
    return any(name.endswith("/update") for _, name, _ in seconds)


def _part(block: re.Match[str]) -> str:
    return PARTS_OF_BLOCK.get(block[2], block[2].strip("/"))


def _regions(seconds: Seconds, directions: Iterable[str] = DIRECTIONS) -> list[Key]:
    """List the keys that are about the model, in the order in which an image passes through it."""
    keys = [key for key in seconds if key[1] not in OF_RANKS and key[2] in directions]
    return sorted(keys, key=_model_order)


def _model_order(key: Key) -> tuple[int, int, str, int]:
    block = _BLOCK.fullmatch(key[1])
    ends = {"stem": _BEFORE, "readout": _AFTER, "loss": _AFTER + 1}
    index = int(block[1]) if block else ends.get(key[1], _AFTER + 2)
    parts = list(PARTS_OF_BLOCK)
    rest = block[2] if block else ""
    part = parts.index(rest) if rest in parts else len(parts)
    return index, part, key[1], DIRECTIONS.index(key[2])
