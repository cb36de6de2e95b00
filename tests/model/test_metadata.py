"""What a weights file says about images and classes, and what is refused in one sentence."""

import json
from pathlib import Path

import pytest

from vigpipe.errors import InputError
from vigpipe.model.metadata import class_names, image_preparation

FILE = Path("w.safetensors")


def test_what_is_there_is_returned_and_what_is_not_is_left_out():
    assert image_preparation({}, FILE) == {}
    given = {"mean": "0.25", "std": "0.5", "model": "vig_digits"}
    assert image_preparation(given, FILE) == {"mean": 0.25, "std": 0.5}
    assert class_names({}, FILE) == ()
    assert class_names({"class_names": json.dumps(["été", "x y"])}, FILE) == ("été", "x y")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean", "much"), ("mean", "inf"), ("std", "0"), ("std", "-1"), ("std", "nan"),
        ("crop_pct", "0"), ("crop_pct", "1.5"), ("crop_pct", "1e-300"), ("crop_pct", "\x1b[2J"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_meant_are_refused(name, value):
    with pytest.raises(InputError, match=rf"^w\.safetensors: its metadata give {name} as ") as told:
        image_preparation({name: value}, FILE)
    assert str(told.value).isprintable()


@pytest.mark.parametrize(
    "text", ["{", "7", '{"a": 1}', "[1]", '["a\\nb"]', '["\\u202e"]', "[" * 100_000]
)
def test_names_that_are_no_list_of_texts_are_refused(text):
    with pytest.raises(InputError, match="a JSON list of texts, each on one line") as told:
        class_names({"class_names": text}, FILE)
    assert len(str(told.value)) < 300
