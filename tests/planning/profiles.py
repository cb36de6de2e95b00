"""Small profiles with known costs, and their files with something changed."""

import json
from typing import Any

from tests.refusals import check_refusals
from vigpipe.planning.profile import Piece, Profile

ROWS = (1, 2, 4)


def make_piece(name, seconds=0.0, weights=0, activation=0, boundary=0, fixed=0.0):
    """A piece that takes `fixed` + `seconds` a row forward, and twice that backward."""
    forward = tuple(fixed + seconds * rows for rows in ROWS)
    return Piece(
        name,
        forward,
        tuple(2 * value for value in forward),
        tuple(activation * rows for rows in ROWS),
        tuple(boundary * rows for rows in ROWS),
        weights,
    )


def make_profile(blocks, stem=None, readout=None, **others):
    """A profile of these blocks: pieces, or seconds a row."""
    pieces = tuple(
        block if isinstance(block, Piece) else make_piece(f"block {i}", block)
        for i, block in enumerate(blocks)
    )
    facts: dict[str, Any] = {
        "slowdown": (1.0,) * 64,  # ranks do not hinder one another
        "dispatch_seconds": 0.0,
        "latency_seconds": 0.0,
        "bandwidth": 1e9,
        "update_seconds": 0.0,
        "fixed_seconds": 0.0,
        "optimizer_bytes": 3.0,
        "base_bytes": 0,
    }
    return Profile(
        model="made",
        options={},
        rows=ROWS,
        stem=stem or make_piece("stem"),
        blocks=pieces,
        readout=readout or make_piece("readout"),
        facts={},
        **(facts | others),
    )


def check_changes(rows, read, path, begin):
    """Check that a JSON file is refused with what a row puts at a place, and in which words."""
    text = path.read_text()

    def read_changed(place, value):
        table = inner = json.loads(text)
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        path.write_text(json.dumps(table))
        read(path)

    check_refusals(rows, read_changed, rf"{path.name}: {begin} .*", where="--profile")
