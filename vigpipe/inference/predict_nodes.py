"""Predict the most likely classes of the nodes of a graph, as evaluation computes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from vigpipe.inference.predict import as_lines, cells, check_finite, top


@dataclass(frozen=True)
class NodePrediction:
    """The most likely classes of one node, at most NUM_SHOWN, most likely first."""

    node: int
    name: str | None  # None if the graph has no names
    labels: tuple[int, ...]
    names: tuple[str, ...]
    probabilities: tuple[float, ...]  # they add up to 1 unless a node may have several classes
    # The classes that are likelier than not, where a node may have several.
    predicted: tuple[str, ...] | None = None

    def as_text(self) -> str:
        """Format as text: one line for the node, one for every class, and an empty one."""
        title = f"node {self.node}" if self.name is None else self.name
        return as_lines(title, self.names, self.probabilities)

    def as_json(self) -> str:
        """Format as one line of JSON."""
        row: dict[str, object] = {"node": self.node}
        if self.name is not None:
            row["name"] = self.name
        predicted = self.names[0] if self.predicted is None else list(self.predicted)
        likely = top(self.names, self.labels, self.probabilities)
        return json.dumps({**row, "predicted": predicted, "top": likely})

    def as_row(self) -> list[object]:
        """Return the cells of a row of CSV, whose head is `head_of_rows("node", "name", ...)`."""
        predicted = self.names[0] if self.predicted is None else ";".join(self.predicted)
        return [self.node, self.name or "", predicted, *cells(self.names, self.probabilities)]


def make_node_prediction(
    number: int,
    name: str | None,
    class_names: Sequence[str],
    labels: Sequence[int],
    probabilities: Sequence[float],
    predicted: Sequence[int] | None,
) -> NodePrediction:
    """Make the prediction of a node from a row of `most_likely`; `class_names` are by label."""
    check_finite(f"node {number}", probabilities)
    names = tuple(class_names[label] for label in labels)
    likely = None if predicted is None else tuple(class_names[label] for label in predicted)
    return NodePrediction(number, name, tuple(labels), names, tuple(probabilities), likely)
