"""What a weights file says about images and classes, and what is refused in one sentence."""

import json
from functools import partial
from pathlib import Path

from tests.refusals import check_refusals
from vigpipe.files.weights_metadata import (
    channels_text,
    class_names,
    image_preparation,
    per_channel,
)

FILE = Path("w.safetensors")


def test_what_is_there_is_returned_and_what_is_not_is_left_out():
    assert image_preparation({}, FILE) == {}
    given = {"mean": "0.25", "std": "0.5", "model": "vig_digits"}
    assert image_preparation(given, FILE) == {"mean": (0.25,), "std": (0.5,)}
    given = {"mean": "0.5, 0.25,0.75, 1", "std": "1,2,3", "crop_pct": "0.5", "in_chans": "4"}
    expected = {"mean": (0.5, 0.25, 0.75, 1.0), "std": (1.0, 2.0, 3.0), "crop_pct": 0.5}
    assert image_preparation(given, FILE) == expected
    assert class_names({}, FILE) == ()
    assert class_names({"class_names": json.dumps(["été", "x y"])}, FILE) == ("été", "x y")


def test_numbers_that_cannot_be_meant_are_refused():
    values = {
        "mean": ("much", "inf", "", "1_0", "\u0660.\u0665", "0.5,", "0.5, 0.5", "0, 0, 0, 0"),
        "std": ("0", "-1", "nan", "1, 1, 0"),
        "crop_pct": ("0", "1.5", "1e-300", "\x1b[2J", "1, 1, 1"),
    }
    check_refusals(
        (partial(image_preparation, {name: value}, FILE), rf"^w\.safetensors: .* give {name} as ")
        for name in values
        for value in values[name]
    )


def test_no_numbers_for_no_channels_are_refused():
    metadata = {"mean": "much", "in_chans": "0"}
    check_refusals([(partial(image_preparation, metadata, FILE), "give mean as much")])


def test_channels_that_the_numbers_are_not_meant_for_have_their_mean():
    assert per_channel((0.5, 0.25, 0.75), 3) == (0.5, 0.25, 0.75)
    assert per_channel((0.5, 0.25, 0.75), 1) == (0.5,)
    assert per_channel((0.3,), 3) == (0.3, 0.3, 0.3)
    assert channels_text((0.3, 0.3, 0.3)) == "0.3"
    assert channels_text((0.5, 0.25, 0.5)) == "0.5, 0.25, 0.5"


def test_names_that_are_no_list_of_texts_are_refused():
    texts = ("{", "7", '{"a": 1}', "[1]", '["a\\nb"]', '["\\u202e"]', "[" * 100_000)
    words = "^.{,200}a JSON list of texts, each on one line.{,100}$"
    check_refusals((partial(class_names, {"class_names": text}, FILE), words) for text in texts)
