"""Read from a weights file which graph model it holds, and what graphs it is for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from vigpipe.config.choices import GRAPH_MODELS, Features, GnnModel, GraphNorm
from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.graphs.graph import Graph
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.gnn.model import GraphModel
from vigpipe.model.metadata import class_names, read_metadata

_COUNTS = ("num_classes", "num_features", "layers", "width", "heads")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "multi_label": ("False", "True"),
    "symmetric": ("False", "True"),
    "norm": get_args(GraphNorm),
    "features": get_args(Features),
}
_MODEL_OPTIONS = ("layers", "width", "heads", "aggregator", "norm", "features", "symmetric")
_MAY_BE_ABSENT = ("heads",)  # a model without attention has none
_MOST = 1 << 30  # the largest count that is believed


@dataclass(frozen=True)
class GraphDescription:
    """Everything that is needed to build a graph model and to prepare its graph."""

    weights: Path  # the file or checkpoint that says so
    model: GnnModel
    num_classes: int
    num_features: int
    multi_label: bool  # whether a node may have several classes
    class_names: tuple[str, ...]  # by label; empty if the file has no names
    options: dict[str, Any]  # those of training that the model and its graph depend on

    def names(self) -> tuple[str, ...]:
        """Name every label: by the file, else by its number."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    def build(self) -> GraphModel:
        """Build the model, with weights from torch's generator."""
        options = self.options
        return create_graph_model(
            self.model,
            in_channels=self.num_features,
            num_classes=self.num_classes,
            num_layers=options["layers"],
            width=options["width"],
            heads=options.get("heads") or 1,
            aggregator=options.get("aggregator"),
            norm=options["norm"],
        )

    def check(self, graph: Graph, data: str) -> None:
        """Raise InputError if the model is for other graphs than the user's --data."""
        for what, actual, expected in (
            ("features", graph.num_features, self.num_features),
            ("classes", graph.num_classes, self.num_classes),
        ):
            if actual != expected:
                raise InputError(
                    f"--data {data}: has {actual} {what}, but the model in {self.weights} was "
                    f"trained on {expected}; give a graph with the same {what}"
                )
        if graph.is_multi_label != self.multi_label:
            kinds = {True: "any number of classes", False: "one class"}
            raise InputError(
                f"--data {data}: a node has {kinds[graph.is_multi_label]}, but for the model in "
                f"{self.weights} it has {kinds[self.multi_label]}; give a graph like that of its "
                "training"
            )


def graph_model_in(weights: Path) -> str | None:
    """Return the name of the graph model that a file holds; None if it does not name one."""
    try:
        name = read_metadata(weights).get("model")
    except InputError:  # whoever reads the whole file words its error better
        return None
    return name if name in GRAPH_MODELS else None


def read_graph_description(weights: Path, data: str = "GRAPH") -> GraphDescription:
    """Find out which graph model a weights file holds; the errors name the user's --data."""
    return describe_graph_model(read_metadata(weights), weights, data)


def describe_graph_model(
    metadata: Mapping[str, str], weights: Path, data: str = "GRAPH"
) -> GraphDescription:
    """Find out which graph model the metadata are of, as `read_graph_description` does."""
    model = metadata.get("model")
    if model not in GRAPH_MODELS:
        what = "does not name a model" if model is None else f"holds a {escaped(model, 40)}"
        raise InputError(
            f"--data {data}: is for a model of a graph ({', '.join(GRAPH_MODELS)}), but {weights} "
            f"{what}; give the model.safetensors of such a run, or name image files instead"
        )
    facts: dict[str, Any] = {}
    for name in _COUNTS:
        text = metadata.get(name, "")
        if text.isdecimal() and text.isascii() and len(text) < 11 and 1 <= int(text) <= _MOST:
            facts[name] = int(text)
        elif text or name not in _MAY_BE_ABSENT:
            raise _unusable(weights, name, text, "a number from 1")
    for name, choices in _CHOICES.items():
        text = metadata.get(name, "")
        if text not in choices:
            raise _unusable(weights, name, text, " or ".join(choices))
        facts[name] = text == "True" if choices == ("False", "True") else text
    facts["aggregator"] = metadata.get("aggregator")
    names = class_names(metadata, weights)
    if names and len(names) != facts["num_classes"]:
        wanted = f"{facts['num_classes']} names"
        raise _unusable(weights, "class_names", f"{len(names)} names", wanted)
    return GraphDescription(
        weights,
        cast("GnnModel", model),
        facts["num_classes"],
        facts["num_features"],
        facts["multi_label"],
        names,
        {name: facts[name] for name in _MODEL_OPTIONS if facts.get(name) is not None},
    )


def _unusable(weights: Path, name: str, text: str, wanted: str) -> InputError:
    given = escaped(text, 40) or "nothing"
    return InputError(
        f"{weights}: its metadata give {name} as {given}, expected {wanted}; write the file again "
        "with vigpipe train"
    )
