"""Draw docs/overview.svg, the picture of the README: `python -m docs.overview WEIGHTS`.

The image is a test image of scikit-learn's digits. The graph is the one that the last block of a
trained vig_digits makes of it; WEIGHTS is the model.safetensors of such a run.
"""

import sys
from pathlib import Path

import torch

import vigpipe
from vigpipe.data.sources import open_source

PAGE = Path(__file__).with_name("overview.svg")
IMAGE = 3  # of the test images: a 4
NODES = (20, 45)  # whose edges are drawn: one on a stroke, one beside it
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759")  # of the micro-batches
INK, PALE, HAIR = "#24292f", "#57606a", "#c8ccd1"
CELL = 19  # pixels of a node's side


def attributes(named: dict[str, str]) -> str:
    """Attributes of an element, with hyphens for underscores."""
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in named.items())


def text(
    x: float, y: float, words: str, size: int = 14, anchor: str = "middle", **more: str
) -> str:
    """A line of text; `more` are attributes, such as fill."""
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}{attributes(more)}>{words}</text>"


def rectangle(x: float, y: float, width: float, height: float, fill: str, **more: str) -> str:
    """A rectangle; `more` are attributes."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
    return f"<rect {place}{attributes(more)}/>"


def arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    """A line with a head at its end."""
    return (
        f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{PALE}" '
        'stroke-width="1.6" marker-end="url(#head)"/>'
    )


def grey(value: float) -> str:
    """The colour of a pixel: 0 is paper, 1 is ink."""
    level = round(255 - 205 * value)
    return f"rgb({level},{level},{level})"


def centre(left: float, top: float, node: int) -> tuple[float, float]:
    """Where a node is in a panel of 8 × 8."""
    row, column = divmod(node, 8)
    return left + (column + 0.5) * CELL, top + (row + 0.5) * CELL


def from_image_to_graph(pixels: list[float], edges: dict[int, list[int]]) -> list[str]:
    """Three panels: the image, its nodes, and the edges of some of them."""
    top, parts = 62.0, []
    lefts = (24.0, 224.0, 424.0)
    for left, head, foot in zip(
        lefts,
        ("image", "nodes", "kNN graph"),
        ("8 × 8 pixels", "one for each patch", "nearest in feature space"),
        strict=True,
    ):
        middle = left + 4 * CELL
        parts += [text(middle, top - 16, head, 16, font_weight="600")]
        parts += [text(middle, top + 8 * CELL + 24, foot, 13, fill=PALE)]
    for node, value in enumerate(pixels):
        row, column = divmod(node, 8)
        x, y = lefts[0] + column * CELL, top + row * CELL
        parts.append(rectangle(x, y, CELL, CELL, grey(value), stroke=HAIR, stroke_width="0.5"))
        for left in lefts[1:]:
            x, y = centre(left, top, node)
            parts.append(
                f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{grey(value)}" stroke="{PALE}" '
                'stroke-width="0.8"/>'
            )
    for (node, neighbours), colour in zip(edges.items(), (COLOURS[1], COLOURS[0]), strict=True):
        x0, y0 = centre(lefts[2], top, node)
        for neighbour in neighbours:
            x1, y1 = centre(lefts[2], top, neighbour)
            parts.append(
                f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{colour}" '
                'stroke-width="2" opacity="0.85"/>'
            )
        for neighbour in (*neighbours, node):
            x1, y1 = centre(lefts[2], top, neighbour)
            radius = 7 if neighbour == node else 3.5
            parts.append(f'<circle cx="{x1:g}" cy="{y1:g}" r="{radius}" fill="{colour}"/>')
    for left in lefts[1:]:
        parts.append(arrow(left - 40, top + 4 * CELL, left - 12, top + 4 * CELL))
    return parts


def stages_and_replicas() -> list[str]:
    """Two replicas of two stages, with their micro-batches in front of them."""
    left, top, width, height, gap = 764.0, 62.0, 138.0, 60.0, 32.0
    parts = [arrow(584, 138, 612, 138)]
    for stage, what in enumerate(("stage 0", "stage 1")):
        x = left + stage * (width + gap) + width / 2
        parts.append(text(x, top - 16, what, 16, font_weight="600"))
    for replica in range(2):
        y = top + replica * (height + gap)
        parts.append(text(624, y + 20, f"replica {replica}", 14, "start", font_weight="600"))
        for i, colour in enumerate(COLOURS):
            x = 624 + i * 21
            parts.append(rectangle(x, y + 30, 18, 18, colour, rx="3"))
            parts.append(text(x + 9, y + 43, str(5 * replica + i), 11, fill="#ffffff"))
        parts.append(arrow(732, y + height / 2, 758, y + height / 2))
        for stage, inside in enumerate((("stem", "blocks 0, 1"), ("blocks 2, 3", "readout"))):
            x = left + stage * (width + gap)
            parts.append(rectangle(x, y, width, height, "#f6f8fa", stroke=INK, rx="8"))
            parts.append(text(x + width / 2, y + 18, f"rank {2 * replica + stage}", 12, fill=PALE))
            parts.append(text(x + width / 2, y + 34, inside[0], 13))
            parts.append(text(x + width / 2, y + 50, inside[1], 13))
        parts.append(
            arrow(left + width + 4, y + height / 2, left + width + gap - 6, y + height / 2)
        )
    for stage in range(2):
        x = left + stage * (width + gap) + width / 2
        parts.append(
            arrow(x, top + height + 7, x, top + height + gap - 7).replace(
                "marker-end", 'marker-start="url(#head)" marker-end'
            )
        )
    x = left + width + gap / 2
    parts.append(text(x, top + height + gap / 2 + 4, "sum of gradients", 12, fill=PALE))
    parts.append(
        text(
            left + width + gap / 2,
            top + 2 * height + gap + 24,
            "blocks cut into stages × replicas",
            13,
            fill=PALE,
        )
    )
    return parts


def one_step() -> list[str]:
    """The schedule of replica 0: GPipe, five micro-batches, a backward twice a forward."""
    left, top, height, unit = 106.0, 312.0, 40.0, 46.0
    head = "one step of replica 0: five micro-batches through two stages"
    parts = [text(24, top - 18, head, 16, "start", font_weight="600")]
    for stage in range(2):
        y = top + stage * (height + 8)
        parts.append(text(24, y + height / 2 + 5, f"stage {stage}", 14, "start"))
        parts.append(rectangle(left, y, 18 * unit, height, "url(#waits)", stroke=HAIR))
        for i, colour in enumerate(COLOURS):
            forward, backward = stage + i, 6 + 2 * (1 - stage) + 2 * i
            for begin, length, opacity, kind in (
                (forward, 1, "0.6", "forward"),
                (backward, 2, "1", "backward"),
            ):
                x, width = left + begin * unit, length * unit
                parts.append(rectangle(x, y, width, height, "#ffffff"))
                parts.append(
                    rectangle(x + 1, y + 1, width - 2, height - 2, colour, opacity=opacity, rx="4")
                )
                words, fill = (str(i), INK) if kind == "forward" else (f"{kind} {i}", "#ffffff")
                parts.append(text(x + width / 2, y + height / 2 + 5, words, 13, fill=fill))
        x = left + 18 * unit
        parts.append(rectangle(x + 1, y + 1, 62, height - 2, INK, rx="4"))
        parts.append(text(x + 32, y + height / 2 + 5, "update", 13, fill="#ffffff"))
    y = top + 2 * height + 32
    foot = (
        "forward passes 0 to 4, then backward passes; striped: the bubble, in which a stage waits"
    )
    parts.append(text(left, y, foot, 13, "start", fill=PALE))
    return parts


def picture(weights: Path) -> str:
    """The whole picture as SVG."""
    model = vigpipe.create_model("vig_digits", num_classes=10, in_chans=1, checkpoint_path=weights)
    image = open_source("digits").test.read([IMAGE])  # (1, 1, 8, 8)
    with torch.no_grad():
        _, graphs = model.eval()(image, return_graph=True)
    neighbours = graphs[len(graphs) - 1].neighbours[0]  # (N, K)
    edges = {node: [i for i in neighbours[node].tolist() if i != node] for node in NODES}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1096 440" role="img" font-family='
        f'"-apple-system, Segoe UI, Helvetica, Arial, sans-serif" fill="{INK}">',
        "<title>From an image to nodes, to a kNN graph, to blocks cut into stages and replicas; "
        "below, five micro-batches on their way through two stages</title>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{PALE}"/>'
        '</marker><pattern id="waits" width="8" height="8" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="8" height="8" fill="#ffffff"/>'
        f'<rect width="3" height="8" fill="#e4e7eb"/></pattern></defs>',
        rectangle(0, 0, 1096, 440, "#ffffff", rx="10"),
        *from_image_to_graph(image.flatten().tolist(), edges),
        *stages_and_replicas(),
        *one_step(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(picture(Path(sys.argv[1])), encoding="utf-8")
