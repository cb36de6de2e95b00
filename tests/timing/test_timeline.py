"""The picture of a step."""

from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from vigpipe.spans import Span
from vigpipe.timing.boxes import COLOURS, by_look, places_of_stages
from vigpipe.timing.timeline import draw_timeline

SPANS = [
    Span(0, "forward", 5.0, 6.0, 0, 0),
    Span(0, "send", 6.0, 6.5, 0, 0),
    Span(0, "wait gradient", 6.5, 8.0, 0, 0),
    Span(0, "backward", 8.0, 10.0, 0, 0),
    Span(0, "all-reduce", 10.0, 11.0),
    Span(1, "other", 5.0, 5.5),
    Span(1, "wait input", 5.5, 6.5, 1, 0),
    Span(1, "forward", 6.5, 7.0, 1, 0),
    Span(1, "backward", 7.0, 8.0, 1, 37),
    Span(1, "optimizer", 8.0, 11.0),
    Span(1, "wait end", 11.0, 12.0),
]

LOOPED = [  # four stages on two ranks
    *(Span(0, "forward", 0.0, 1.0, 0, 0), Span(0, "forward", 2.0, 3.0, 2, 0)),
    *(Span(1, "forward", 1.0, 2.0, 1, 0), Span(1, "forward", 3.0, 4.0, 3, 0)),
]


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


def text_of(path) -> str:
    """All text of an SVG: matplotlib draws letters as shapes and keeps the text in comments."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.parse(path, ElementTree.XMLParser(target=builder)).getroot()
    return " ".join(node.text.strip() for node in root.iter() if node.text)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline")
    paths = [folder / "timeline.png", folder / "timeline.svg"]
    draw_timeline({"measured": SPANS, "predicted": SPANS[:4]}, paths)
    return paths


def test_the_png_shows_every_kind_in_proportion_to_its_time(pictures):
    pixels = np.asarray(Image.open(pictures[0]).convert("RGB")).reshape(-1, 3)
    areas = {kind: int((pixels == rgb(COLOURS[kind])).all(1).sum()) for kind in COLOURS}
    assert min(areas.values()) > 500
    # Kinds that are drawn once, without a number in them, and whose keys are equally large.
    assert areas["optimizer"] > 2 * areas["all-reduce"] > 2 * areas["other"]


def test_the_svg_is_xml_with_titles_ranks_keys_and_microbatches(pictures):
    text = text_of(pictures[1])
    for word in ("measured: 7000 ms", "predicted: 5000 ms", "rank 0", "rank 1", "37", *COLOURS):
        assert word in text, word


def test_a_box_too_narrow_for_its_number_has_none(tmp_path):
    spans = [Span(0, "forward", 0.0, 1.0, 0, 11), Span(0, "backward", 1.0, 1.01, 0, 22)]
    draw_timeline({"some": spans}, [tmp_path / "some.svg"])
    text = text_of(tmp_path / "some.svg")
    assert "11" in text.split()
    assert "22" not in text.split()


def test_a_title_is_text_and_no_mathematics_and_only_kinds_that_occur_are_explained(tmp_path):
    spans = [Span(0, "forward", 3.0, 3.025, 0, 0)]
    draw_timeline({"a $\\frac{ b$ c": spans}, [tmp_path / "some.svg"])
    text = text_of(tmp_path / "some.svg")
    assert "a $\\frac{ b$ c: 25 ms" in text
    assert "forward" in text
    assert "optimizer" not in text


def test_stages_of_a_rank_are_named_and_explained_and_the_later_ones_are_paler(pictures, tmp_path):
    assert "The number in a box is the micro-batch; a box" in text_of(pictures[1])
    svg, png = tmp_path / "some.svg", tmp_path / "some.png"
    draw_timeline({"some": LOOPED}, [svg, png])
    text = text_of(svg)
    assert "with the stage below it (s1 is stage 1)" in text
    for word in ("s0", "s1", "s2", "s3", "forward, stages 0–1", "forward, stages 2–3"):
        assert word in text, word
    pixels = np.asarray(Image.open(png).convert("RGB")).reshape(-1, 3)
    first, later = (look.colour for look in by_look(LOOPED, places_of_stages(LOOPED)))
    assert all(dark < pale for dark, pale in zip(rgb(first), rgb(later), strict=True))
    areas = [int((pixels == rgb(colour)).all(1).sum()) for colour in (first, later)]
    assert min(areas) > 0.8 * max(areas) > 5000
