"""Which of a model's classes those of labelled data are."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vigpipe.data.left_out import counted
from vigpipe.errors import InputError
from vigpipe.files.names import are_numbers, first_few
from vigpipe.messages import plural


class Matched(NamedTuple):
    """The classes of data as a model has them."""

    labels: np.ndarray  # (classes of the data,) int64, the model's label of each
    names: tuple[str, ...]  # of the model's classes; the data's if the file has none
    notes: tuple[str, ...] = ()


def match_classes(
    ours: Sequence[str],
    theirs: Sequence[str],
    num_classes: int,
    data: str,
    weights: str,
    *,
    may_be_fewer: bool = False,
) -> Matched:
    """Match classes by their names if both have some, in any order, else by their numbers.

    Args:
        ours: the data's names, or numbers where they have none.
        theirs: the names that the file of weights has; empty, or numbers, if it has none.
        num_classes: the model's.
        data: what the data are called in messages.
        weights: the same, of the file.
        may_be_fewer: whether data without names may have the first of the model's classes only.

    Raises:
        InputError: the data have classes that the model does not know, or another number of them.
    """
    label_of = {name: label for label, name in enumerate(theirs)}
    unknown = [name for name in ours if name not in label_of]
    if not unknown and len(theirs) == num_classes:
        return Matched(np.array([label_of[name] for name in ours]), tuple(theirs))
    ours_are_numbers = are_numbers(ours)
    if theirs and not are_numbers(theirs) and not ours_are_numbers:
        raise InputError(
            f"{data}: has {counted(unknown, 'class', 'classes')}, which the model in {weights} "
            f"does not know: its classes are {first_few(theirs)}; leave these out"
        )
    is_part = may_be_fewer and ours_are_numbers and len(ours) < num_classes
    if len(ours) != num_classes and not is_part:
        raise InputError(
            f"{data}: has {plural(len(ours), 'class')}, and the model in {weights} {num_classes}; "
            "one of the two does not name them, so give data of as many"
        )
    of_model = tuple(theirs) or tuple(map(str, range(num_classes)))
    names = of_model if ours_are_numbers else tuple(ours)
    nameless = data if ours_are_numbers else weights
    note = f"{nameless} does not name its classes: they are taken to be {first_few(names)}"
    is_told = not (ours_are_numbers and are_numbers(of_model))
    return Matched(np.arange(len(ours)), names, (note,) if is_told else ())
