"""What callers give from Python is of the declared types, or refused in a sentence."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import vigpipe
from tests.refusals import check_refusals
from vigpipe.api import as_arguments
from vigpipe.config.typed import MOST_TEXT, checked, typed

TAKEN = [
    (int, np.int64(3), 3),
    (float, np.float32(0.5), 0.5),
    (float | None, None, None),
    (float, 2, 2),
    (bool, np.bool_(True), True),
    (Path, "a b", Path("a b")),
    (Path | str, Path("x"), Path("x")),
    (Path | str, "caf\udce9\n\u200f" + 1500 * "x", Path("caf\udce9\n\u200f" + 1500 * "x")),
    (int | Literal["auto"] | Path, "auto", "auto"),
    (int | tuple[int, int], [2, 3], (2, 3)),
    (Path | str | Iterable[Path | str], ["a", Path("b")], [Path("a"), Path("b")]),
]
REFUSED = [
    (int, True, "=True: must be a whole number"),
    (int, 1.0, "=1.0: must be a whole number"),
    (int, 10**5000, "=a number without end: must be a whole number"),
    (float, "1", "='1': must be a number"),
    (bool, 1, "=1: must be true or false"),
    (str, Path("x"), r"PosixPath\('x'\): must be text"),
    (Path | str, "", "='': must be a path or text on one line"),
    (Path, "", "='': must be a path$"),
    (Path | str, "x\0y", r"='x.x00y': must be a path or text"),
    (Path | str, "\ud800", r"='.ud800': must be"),
    (str, "9" * (MOST_TEXT + 1), f"1 to {MOST_TEXT} characters"),
    (Literal["a", "b"], "c", "='c': must be one of a, b"),
    (Iterable[Path | str], [3], "one of them=3: must be a path or text"),
    (Callable[[int], bool] | None, 3, "=3: must be a function"),
    (tuple[int, int], (1,), r"=\(1,\): must be 2 times a whole number"),
    (int, object(), "=object: must be a whole number"),
]


def test_values_are_taken_as_their_types_have_them():
    for hint, value, wanted in TAKEN:
        found = checked("x", value, hint)
        assert (type(found), found) == (type(wanted), wanted)


def test_values_of_other_types_are_refused():
    rows = [(value, hint, words) for hint, value, words in REFUSED]
    check_refusals(rows, lambda value, hint: checked("x", value, hint), where="x")


def test_a_function_checks_its_arguments_first():
    @typed
    def double(x: int, *, names: Iterable[str] = ()) -> int:
        return 2 * x

    assert double(np.int64(2), names=("a",)) == 4  # pyrefly: ignore[bad-argument-type]
    rows = [(lambda: double("2"), "'2': must be a whole"), (lambda: double(2, names="a"), "'a'")]  # pyrefly: ignore[bad-argument-type]
    check_refusals(rows, begin=r"double: .*")
    with pytest.raises(TypeError):
        double()  # pyrefly: ignore[missing-argument]


def test_every_function_of_the_package_refuses_wrong_types():
    rows = [
        (lambda: as_arguments({"steps": True}), "steps=True: must be a whole number"),
        (lambda: as_arguments({"graph": Path("knn")}), "graph=.*must be text"),
        (lambda: as_arguments({"out": "a\0"}), "out=.*must be a path"),
        (lambda: vigpipe.train(quiet=3), "train: quiet=3"),  # pyrefly: ignore[bad-argument-type]
        (lambda: vigpipe.load(3), "load: weights=3"),  # pyrefly: ignore[bad-argument-type]
        (lambda: vigpipe.load("w", device="banana"), "device='banana': cannot be used here"),
        (lambda: vigpipe.load("w", image_size=True), "image_size=True"),
        (lambda: vigpipe.load_graph_model(None), "weights=None"),  # pyrefly: ignore[bad-argument-type]
        (lambda: vigpipe.predict("w", 3), "predict: images=3"),  # pyrefly: ignore[bad-argument-type]
        (lambda: vigpipe.predict("w", [], batch_size=1.5), "batch_size=1.5"),  # pyrefly: ignore[bad-argument-type]
        (lambda: vigpipe.prepack(None, "\x1b"), r"'.x1b'"),  # pyrefly: ignore[bad-argument-type]
    ]
    check_refusals(rows)
    words = as_arguments({"fanout": 10, "data": Path("d"), "lr": np.float32(0.5), "resume": None})
    assert words == ["--fanout=10", "--data=d", "--lr=0.5"]
