"""Print a Markdown table of variants' sizes, of all by default: `python -m vigpipe.model.table`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch.utils.flop_counter import FlopCounterMode

from vigpipe.errors import InputError
from vigpipe.messages import tell
from vigpipe.model.image import ImageModel
from vigpipe.model.position import Grid
from vigpipe.model.shapes import SHAPES
from vigpipe.model.variants import create_model, pretrained_cfg


@dataclass(frozen=True)
class Figures:
    """The size of a variant, for images of the size it is designed for."""

    name: str  # name of the variant
    img_size: Grid  # height and width of its images in pixels
    grid: Grid  # height and width in nodes, in the first blocks
    # Blocks of each resolution; a single number if the variant is isotropic. Of the models without
    # kNN, local ones and graph blocks.
    blocks: tuple[int | tuple[int, int], ...]
    channels: tuple[int, ...]  # C of each resolution
    num_parameters: int  # count of the numbers that are trained
    # Count of the numbers that are not trained: running statistics and tables of positions.
    num_buffers: int
    # Multiply-accumulate operations of one image's forward in convolutions and matrix products,
    # including those for the distances between nodes.
    num_macs: int


def figures(name: str) -> Figures:
    """Count the parameters, buffers and operations of a variant, without allocating its weights.

    Raises:
        InputError: there is no such variant.
    """
    if name not in SHAPES:
        raise InputError(f"{name}: no such variant; choose from {', '.join(SHAPES)}")
    config = pretrained_cfg(name)
    channels, *_ = config["input_size"]
    with torch.device("meta"):
        model = create_model(name, num_classes=config["num_classes"], in_chans=channels).eval()
        image = torch.empty(1, *config["input_size"])
    assert isinstance(model, ImageModel)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return Figures(
        name,
        model.img_size,
        model.grid,
        SHAPES[name].blocks,
        SHAPES[name].channels,
        sum(parameter.numel() for parameter in model.parameters()),
        sum(buffer.numel() for buffer in model.buffers()),
        counter.get_total_flops() // 2,  # a multiplication and its addition count as two FLOPs
    )


def main(names: Sequence[str] | None = None) -> None:
    """Print the table of some variants; by default of those on the command line, or of all."""
    rows = [figures(name) for name in (names or sys.argv[1:] or SHAPES)]
    table = {
        "variant": [f"`{row.name}`" for row in rows],
        "images": ["×".join(map(str, row.img_size)) for row in rows],
        "nodes": ["×".join(map(str, row.grid)) for row in rows],
        "blocks": [", ".join(map(_count, row.blocks)) for row in rows],
        "channels": [", ".join(map(str, row.channels)) for row in rows],
        "parameters": [f"{row.num_parameters:,}" for row in rows],
        "buffers": [f"{row.num_buffers:,}" for row in rows],
        "GMAC": [f"{row.num_macs / 1e9:.3f}" for row in rows],
    }
    right = ("parameters", "buffers", "GMAC")
    align = ["right" if column in right else "left" for column in table]
    print(tabulate(table, headers="keys", tablefmt="github", colalign=align, disable_numparse=True))


def _count(blocks: int | tuple[int, int]) -> str:
    return str(blocks) if isinstance(blocks, int) else f"{blocks[0]}+{blocks[1]}"


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        tell(str(error))
        sys.exit(2)
