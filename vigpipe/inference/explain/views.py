"""Names, places, arrays and pictures of what an explanation is about: an image or a graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vigpipe.files.names import escaped
from vigpipe.graphs.graph import Graph
from vigpipe.inference.explain.explanation import EdgeShares, Explanation, strongest
from vigpipe.inference.explain.node import NodeInputs
from vigpipe.inference.explain.picture import Arrows, Heat, draw_explanation
from vigpipe.inference.panels import size_of
from vigpipe.messages import plural
from vigpipe.model.position import Grid

_MOST_NODES, _MOST_NAMES = 100, 12  # of a graph in a picture
_LONGEST = 60  # characters of a name


@dataclass(frozen=True)
class ImageView:
    """Rows and columns of the nodes of an image.

    Attributes:
        explanation: of the image.
        pixels: the image as the model sees it, (H, W, 3) uint8.
        grids: the grids of nodes and of candidates of each block that has edges.
    """

    explanation: Explanation
    pixels: np.ndarray
    grids: dict[int, tuple[Grid, Grid]]

    kind = "block"

    def part(self, index: int) -> tuple[str, float]:
        """Return the name of what is occluded, and its gradient × input."""
        found, position = self.explanation, divmod(index, self.explanation.drops.shape[1])
        spans = [
            _span(name, i * found.side, min((i + 1) * found.side, num) - 1)
            for name, i, num in zip(("row", "column"), position, found.gradient.shape, strict=True)
        ]
        return ", ".join(spans), float(self.gradient[position])

    @property
    def gradient(self) -> np.ndarray:
        """Gradient × input of what is occluded, (H', W')."""
        found, sums = self.explanation, self.explanation.gradient
        for axis, num in enumerate(sums.shape):
            sums = np.add.reduceat(sums, np.arange(0, num, found.side), axis)
        return sums

    def edge(self, edges: EdgeShares, index: int) -> str:
        """Name an edge of a block."""
        (_, width), (_, candidates) = self.grids[edges.block]
        ends = [
            "row {}, column {}".format(*divmod(int(i), n))
            for i, n in ((edges.targets[index], width), (edges.sources[index], candidates))
        ]
        return f"{ends[0]} from {ends[1]}"

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what is to be written, by name; rows of edges are nodes, as in a graph."""
        arrays = {}
        for edges in self.explanation.edges:
            height, width = self.grids[edges.block][0]
            for name, values in (
                ("neighbours", edges.sources),
                ("gradient", edges.gradient),
                ("drops", edges.drops),
            ):
                arrays[f"block{edges.block}_{name}"] = values.reshape(height * width, -1)
        return arrays

    def draw(self, blocks: Sequence[int], heading: Sequence[str], path: Path) -> None:
        """Draw the nodes and the edges of some blocks."""
        found = self.explanation
        panels: list[Heat | Arrows] = [
            Heat(_title("gradient × input", self.gradient), self.gradient),
            Heat(_title(self.occluded, found.drops), found.drops),
        ]
        for edges in found.edges:
            if edges.block not in blocks:
                continue
            some = edges.measured
            ends = [
                _centres(numbers[some], grid)
                for numbers, grid in zip(
                    (edges.targets, edges.sources), self.grids[edges.block], strict=True
                )
            ]
            drops = edges.drops[some]
            panels.append(Arrows(_edges_title(self.kind, edges, drops), ends[1], ends[0], drops))
        draw_explanation(self.pixels, panels, heading, path)

    @property
    def occluded(self) -> str:
        """What is left out at a time."""
        side = self.explanation.side
        return "a node occluded" if side == 1 else f"{size_of((side, side))} nodes occluded"


@dataclass(frozen=True)
class NodeView:
    """Numbers and names of the nodes around one of a graph."""

    explanation: Explanation
    graph: Graph
    around: NodeInputs

    kind = "layer"
    occluded = "a node's features 0"

    def name(self, index: int) -> str:
        """Name one of the nodes around."""
        return escaped(self.graph.name_of(self.around.nodes[index]), _LONGEST)

    def part(self, index: int) -> tuple[str, float]:
        return self.name(index), float(self.explanation.gradient[index])

    def edge(self, edges: EdgeShares, index: int) -> str:
        return f"{self.name(edges.targets[index])} from {self.name(edges.sources[index])}"

    def arrays(self) -> dict[str, np.ndarray]:
        numbers = self.graph.numbers_of(self.around.nodes)
        arrays = {"nodes": numbers, "steps": self.around.steps}
        for edges in self.explanation.edges:
            arrays |= {
                f"layer{edges.block}_sources": numbers[edges.sources],
                f"layer{edges.block}_targets": numbers[edges.targets],
                f"layer{edges.block}_gradient": edges.gradient,
                f"layer{edges.block}_drops": edges.drops,
            }
        return arrays

    def draw(self, blocks: Sequence[int], heading: Sequence[str], path: Path) -> None:
        found = self.explanation
        drawn = [edges for edges in found.edges if edges.block in blocks]
        shown, place = self._shown(drawn)
        places = self._places(shown, drawn)
        panels: list[Heat | Arrows] = [
            Heat(_title("gradient × input", found.gradient), found.gradient[shown]),
            Heat(_title(self.occluded, found.drops), found.drops[shown]),
        ]
        for edges in drawn:
            some = edges.measured
            ends = [places[place[numbers[some]]] for numbers in (edges.sources, edges.targets)]
            is_shown = (place[edges.sources[some]] >= 0) & (place[edges.targets[some]] >= 0)
            starts, stops = (points[is_shown] for points in ends)
            drops = edges.drops[some][is_shown]
            panels.append(Arrows(_edges_title(self.kind, edges, drops), starts, stops, drops))
        names = [self.name(i) for i in shown[:_MOST_NAMES]]
        draw_explanation(places, panels, heading, path, names)

    def _shown(self, drawn: Sequence[EdgeShares]) -> tuple[np.ndarray, np.ndarray]:
        """Return the nodes to draw, the node itself first, and the place of each among them."""
        wanted = [np.array([0]), strongest(self.explanation.drops)]
        wanted += [
            ends[edges.measured] for edges in drawn for ends in (edges.sources, edges.targets)
        ]
        numbers, first = np.unique(np.concatenate(wanted), return_index=True)
        shown = numbers[np.argsort(first)][:_MOST_NODES]
        place = np.full(len(self.around.nodes), -1)
        place[shown] = np.arange(len(shown))
        return shown, place

    def _places(self, shown: np.ndarray, drawn: Sequence[EdgeShares]) -> np.ndarray:
        """Put nodes on rings, by their steps from the node, beside those that they bring to."""
        steps, angles = self.around.steps, np.zeros(len(self.around.nodes))
        places = np.full((len(shown), 2), 0.5)
        for step in range(1, int(steps[shown].max()) + 1):
            ring = np.flatnonzero(steps[shown] == step)
            order = ring[np.argsort([self._towards(shown[i], angles, drawn) for i in ring])]
            # Rings are turned against each other, or arrows would run through other nodes.
            angles[shown[order]] = turns = step + 2 * np.pi * np.arange(len(order)) / len(order)
            radius = 0.5 * step / steps[shown].max()
            places[order] = 0.5 + radius * np.stack((np.cos(turns), np.sin(turns)), 1)
        return places

    def _towards(self, node: int, angles: np.ndarray, drawn: Sequence[EdgeShares]) -> float:
        """Return the angle of a node one step nearer that this one brings something to."""
        for edges in drawn:
            ends = edges.targets[edges.sources == node]
            nearer = ends[self.around.steps[ends] < self.around.steps[node]]
            if len(nearer):
                return float(angles[nearer[0]])
        return 0.0


View = ImageView | NodeView


def _span(name: str, first: int, last: int) -> str:
    """Write the numbers of some rows or columns."""
    return f"{name} {first}" if first == last else f"{name}s {first}-{last}"


def _centres(numbers: np.ndarray, grid: Grid) -> np.ndarray:
    """Return where the centres of nodes are, (k, 2): x and y as fractions of the image."""
    rows, columns = np.divmod(numbers, grid[1])
    return np.stack(((columns + 0.5) / grid[1], (rows + 0.5) / grid[0]), 1)


def _title(what: str, values: np.ndarray) -> str:
    largest = np.nanmax(np.abs(values), initial=0.0)
    return f"{what}\nup to ±{largest:.3g}"


def _edges_title(kind: str, edges: EdgeShares, drops: np.ndarray) -> str:
    """Write what arrows with these drops are."""
    num = plural(len(edges.gradient), "edge")
    return _title(f"{kind} {edges.block}: {len(drops)} of {num}, left out alone", drops)
