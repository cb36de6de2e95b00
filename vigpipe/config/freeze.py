"""Parse which pieces of a model are not trained (--freeze)."""

import re
from collections.abc import Collection

from vigpipe.config.declare import listed
from vigpipe.errors import InputError


def parse_freeze(text: str | None, num_blocks: int, ends: Collection[str]) -> frozenset[str]:
    """Return the pieces that are not trained: `stem`, `readout` and blocks by their number as text.

    Args:
        text: such as stem,0-7,readout; None for nothing.
        num_blocks: of the model; a number from there on is an InputError.
        ends: those of `stem` and `readout` that the model has.
    """
    if text is None:
        return frozenset()
    pieces: set[str] = set()
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", word.strip())
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            if first <= last < num_blocks:
                pieces.update(map(str, range(first, last + 1)))
                continue
        elif word.strip() in ends:
            pieces.add(word.strip())
            continue
        expected = listed([*ends, f"blocks from 0 to {num_blocks - 1}, such as 1 or 0-1"])
        raise InputError(f"--freeze {text}: has {word.strip()!r}, expected {expected}")
    if len(pieces) == num_blocks + len(ends):
        raise InputError(f"--freeze {text}: leaves nothing to train; leave a piece out")
    return frozenset(pieces)
