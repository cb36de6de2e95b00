"""What a weights file says about images and classes, and what is refused in one sentence."""

import json
from functools import partial
from pathlib import Path

from tests.refusals import check_refusals
from vigpipe.files.weights_metadata import class_names, image_preparation

FILE = Path("w.safetensors")


def test_what_is_there_is_returned_and_what_is_not_is_left_out():
    assert image_preparation({}, FILE) == {}
    given = {"mean": "0.25", "std": "0.5", "model": "vig_digits"}
    assert image_preparation(given, FILE) == {"mean": 0.25, "std": 0.5}
    assert class_names({}, FILE) == ()
    assert class_names({"class_names": json.dumps(["été", "x y"])}, FILE) == ("été", "x y")


def test_numbers_that_cannot_be_meant_are_refused():
    values = {
        "mean": ("much", "inf"),
        "std": ("0", "-1", "nan"),
        "crop_pct": ("0", "1.5", "1e-300", "\x1b[2J"),
    }
    check_refusals(
        (partial(image_preparation, {name: value}, FILE), rf"^w\.safetensors: .* give {name} as ")
        for name in values
        for value in values[name]
    )


def test_names_that_are_no_list_of_texts_are_refused():
    texts = ("{", "7", '{"a": 1}', "[1]", '["a\\nb"]', '["\\u202e"]', "[" * 100_000)
    words = "^.{,200}a JSON list of texts, each on one line.{,100}$"
    check_refusals((partial(class_names, {"class_names": text}, FILE), words) for text in texts)
