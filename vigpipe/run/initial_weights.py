"""Begin a run with the weights of a file, whose classes may be in another order than the data's."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vigpipe.config.of_weights import said_options
from vigpipe.config.options import TrainConfig, as_given
from vigpipe.errors import InputError
from vigpipe.files.names import are_numbers, first_few
from vigpipe.files.weights_metadata import class_names, metadata_if_any
from vigpipe.job.job import Job
from vigpipe.model.fit import match_state, with_classes
from vigpipe.model.published import to_own_names
from vigpipe.model.staged import StagedModel
from vigpipe.model.weights import read_weights

_OF_DATA = {  # facts that the data decide, as metadata name them, and in words
    "in_chans": "channels of an image",
    "num_features": "features of a node",
    "multi_label": "several classes of a node",
}


def read_initial(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file under the models' own names; see `read_weights`."""
    return to_own_names(read_weights(path))


def initial_state(
    state: Mapping[str, Tensor],
    config: TrainConfig,
    job: Job,
    model: StagedModel,
    *,
    is_finite: bool = False,
) -> dict[str, Tensor]:
    """Make what `read_initial` has read of --weights fit the model, and its classes the data's.

    Where it is known that the numbers are finite, none is read.

    Raises:
        InputError: the file is for another model, or for data of another kind.
    """
    path, data = config.weights, f"--data {config.data}"
    assert path is not None
    metadata, facts = metadata_if_any(path), job.weights_metadata()
    for name, words in _OF_DATA.items():
        if name == "multi_label" and config.new_classifier:
            continue
        there, needed = metadata.get(name), str(facts.get(name))
        if name in facts and there not in (None, needed):
            raise InputError(
                f"{path}: was trained on data with {words}: {there}, and {data} has {needed}; "
                "give data like those, or choose other weights"
            )
    order, _ = _class_order(metadata, config, job)
    matched = match_state(
        state, model, str(path), new_classifier=config.new_classifier, is_finite=is_finite
    )
    return matched if order is None else with_classes(matched, model, order)


def notes_on_weights(config: TrainConfig, job: Job) -> list[str]:
    """Say what the file of --weights says of itself, and how its classes become the data's."""
    if config.weights is None:
        return []
    metadata = metadata_if_any(config.weights)
    notes: list[str] = []
    if "model" in metadata:
        options = said_options(metadata, config.weights).items()
        said = " ".join([f"--model {metadata['model']}", *(as_given(*of) for of in options)])
        notes.append(f"{config.weights} was trained with {said}")
    has = str(job.weights_metadata().get("edge_weights"))
    if "num_features" in metadata and metadata.get("edge_weights", "False") != has:
        words = {"True": "with", "False": "without"}
        had = words.get(metadata.get("edge_weights", "False"), "perhaps with")
        notes.append(
            f"{config.weights} was trained {had} weights of edges, and --data {config.data} is "
            f"{words[has]}"
        )
    _, note = _class_order(metadata, config, job)
    return notes if note is None else [*notes, note]


def _class_order(
    metadata: Mapping[str, str], config: TrainConfig, job: Job
) -> tuple[list[int] | None, str | None]:
    """Return for each class of the data its label in the file, None if the same, and a note.

    InputError if the file has other classes.
    """
    path, data, ours = config.weights, f"--data {config.data}", job.class_names
    assert path is not None
    theirs = class_names(metadata, path)
    if config.new_classifier or theirs == ours:
        return None, None
    if are_numbers(theirs):
        return None, f"{path} does not name its classes: they are taken to be {first_few(ours)}"
    if are_numbers(ours):
        return None, f"{data} does not name its classes: they are taken to be {first_few(theirs)}"
    if sorted(theirs) == sorted(ours):
        labels = {name: label for label, name in enumerate(theirs)}
        order = [labels[name] for name in ours]
        return order, (
            f"{path} has its classes in another order, {first_few(theirs)}: the last layer is "
            f"reordered to {first_few(ours)}"
        )
    raise InputError(
        f"{path}: its classes are {first_few(theirs)}, and those of {data} {first_few(ours)}; give "
        "data of the same classes, or train a new last layer with vigpipe train --new-classifier"
    )
