"""What the tables of durations say: stages, the parts of the model, block by block.

A value is what something took in one step, all its micro-batches together, on the rank that took
longest: as in the tables that a timed run prints.
"""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from vigpipe.spans import COMPUTE
from vigpipe.timing.tables import DIRECTIONS, OF_RANKS, Key, Statistics, statistics

Seconds = Mapping[Key, list[float]]  # as vigpipe.timing.tables.slowest returns them
Rows = list[tuple[str, str, Statistics]]  # name, direction, numbers

PARTS_OF_BLOCK = {
    "": "block",
    "/grapher": "Grapher",
    "/grapher/knn": "kNN",
    "/grapher/aggregation": "aggregation",
    "/ffn": "FFN",
}
COMPARED = ("step", *COMPUTE, "all-reduce", "optimizer")
_BLOCK = re.compile(r"block (\d+)(/.*)?")
_BEFORE, _AFTER = -1, 1 << 30  # all blocks


def stage_rows(seconds: Seconds) -> Rows:
    """The whole step and what is about no single stage, then every stage."""
    keys = [key for key in seconds if key[1] in OF_RANKS]
    keys.sort(key=lambda key: (key[0], OF_RANKS.index(key[1])))
    named = [("all" if key[0] < 0 else f"stage {key[0]}", key[1], key) for key in keys]
    return [(place, name, statistics(seconds[key])) for place, name, key in named]


def part_rows(seconds: Seconds) -> Rows:
    """Stem, one block and its parts over all blocks, readout, loss."""
    pooled: dict[tuple[str, str], list[float]] = {}
    for key in _regions(seconds):
        block = _BLOCK.fullmatch(key[1])
        name = f"one {_part(block)}" if block and not block[2] else _part(block) or key[1]
        pooled.setdefault((name, key[2]), []).extend(seconds[key])
    order = ["stem", "one block", *list(PARTS_OF_BLOCK.values())[1:], "readout", "loss"]
    names = sorted(pooled, key=lambda it: order.index(it[0]) if it[0] in order else len(order))
    return [(name, direction, statistics(pooled[name, direction])) for name, direction in names]


def block_rows(seconds: Seconds) -> Rows:
    """Every block, and each of its parts by itself."""
    rows: Rows = []
    for key in _regions(seconds):
        block = _BLOCK.fullmatch(key[1])
        if block:
            name = f"block {block[1]}" + (f", {_part(block)}" if block[2] else "")
            rows.append((name, key[2], statistics(seconds[key])))
    return rows


def medians(seconds: Seconds) -> dict[str, float]:
    """What runs are compared by: medians of the step, of stages and of the model's parts."""
    rows = [row for row in stage_rows(seconds) if row[1] in COMPARED]
    rows += part_rows(seconds)
    named = {f"{place}, {name}" if name else place: numbers for place, name, numbers in rows}
    return {name.removeprefix("all, "): numbers.median for name, numbers in named.items()}


def stacked_medians(seconds: Seconds, direction: str) -> dict[str, dict[str, float]]:
    """What a column of a chart is made of: seconds of each part of each piece of the model.

    Returns:
        by part ("kNN", "aggregation", "rest of the Grapher", "FFN", "rest of the block",
        "whole": what has no parts), by piece ("stem", "block 0", …, "readout", "loss"); a
        piece's parts add up to its median unless theirs exceed it.
    """
    own = {key[1]: float(np.median(seconds[key])) for key in _regions(seconds, {direction})}
    stacked: dict[str, dict[str, float]] = {}

    def put(part: str, piece: str, value: float) -> None:
        stacked.setdefault(part, {})[piece] = max(value, 0.0)

    for piece in [name for name in own if "/" not in name]:
        inner = {part: own.get(piece + part, 0.0) for part in PARTS_OF_BLOCK}
        if not any(inner[part] for part in PARTS_OF_BLOCK if part):
            put("whole", piece, own[piece])
            continue
        graph = inner["/grapher/knn"] + inner["/grapher/aggregation"]
        put("kNN", piece, inner["/grapher/knn"])
        put("aggregation", piece, inner["/grapher/aggregation"])
        put("rest of the Grapher", piece, inner["/grapher"] - graph)
        put("FFN", piece, inner["/ffn"])
        put("rest of the block", piece, own[piece] - inner["/grapher"] - inner["/ffn"])
    return stacked


def _part(block: "re.Match[str] | None") -> str:
    if block is None:
        return ""
    return PARTS_OF_BLOCK.get(block[2] or "", (block[2] or "").strip("/"))


def _regions(seconds: Seconds, directions: Iterable[str] = DIRECTIONS) -> list[Key]:
    """What is about the model and not about ranks, in the order in which an image meets it."""
    keys = [key for key in seconds if key[1] not in OF_RANKS and key[2] in directions]
    return sorted(keys, key=_place)


def _place(key: Key) -> tuple[int, int, str, int]:
    block = _BLOCK.fullmatch(key[1])
    ends = {"stem": _BEFORE, "readout": _AFTER, "loss": _AFTER + 1}
    index = int(block[1]) if block else ends.get(key[1], _AFTER + 2)
    parts = list(PARTS_OF_BLOCK)
    rest = (block[2] or "") if block else ""
    part = parts.index(rest) if rest in parts else len(parts)
    return index, part, key[1], DIRECTIONS.index(key[2])
