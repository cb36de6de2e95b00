"""Which blocks of a model a command is to draw."""

from collections.abc import Sequence

from vigpipe.errors import InputError


def parse_blocks(text: str | None, backbone: Sequence[bool], kind: str = "block") -> list[int]:
    """Read the blocks to draw, `I,J,...`; `backbone` tells which of its entries have a graph.

    By default the first, the middle and the last one. The kind is what the model calls them.
    """
    with_graph = [i for i, has_graph in enumerate(backbone) if has_graph]
    named = f"{kind}s" if all(backbone) else "entries"
    if text is None:
        return sorted({with_graph[0], with_graph[len(with_graph) // 2], with_graph[-1]})
    try:
        blocks = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"--block {text}: must be numbers of {kind}s, such as --block {with_graph[0]},"
            f"{with_graph[-1]}"
        ) from error
    for block in blocks:
        if not 0 <= block < len(backbone):
            raise InputError(
                f"--block {block}: the model has {named} 0 to {len(backbone) - 1}; choose among "
                f"{_ranges(with_graph)}"
            )
        if not backbone[block]:
            raise InputError(
                f"--block {block}: entry {block} of the backbone only halves the resolution and "
                f"has no graph; choose among {_ranges(with_graph)}"
            )
    return list(dict.fromkeys(blocks))


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers as ranges: 0, 1, 2, 4, 5 as `0-2, 4-5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
