"""Profiles: written and read back, costs between two sizes, and files that are none."""

import json
from dataclasses import replace

import pytest

from tests.planning.profiles import check_changes, make_piece, make_profile
from vigpipe.errors import InputError
from vigpipe.planning.profile import Amounts, Piece, read_profile, write_profile
from vigpipe.planning.search import search
from vigpipe.planning.step import Request, stage_costs
from vigpipe.planning.ways import check_options

PROFILE = make_profile(
    [make_piece("block 0", 1.0, weights=100, activation=7, boundary=3), 2.0],
    make_piece("stem", weights=10),
    make_piece("readout", weights=1),
    slowdown=(1.0, 1.25),
    rounds=((1.0, 1.25), (0.75, 1.5)),
)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile = replace(PROFILE, options={"dtype": "float32"}, facts={"threads": 1, "µs": [1.5]})
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("rows", "value"),
    [(0.5, 5.0), (1.5, 13.0), (2, 16.0), (3, 20.0), (8, 48.0)],
)
def test_costs_between_and_beyond_the_measured_sizes(rows, value):
    assert PROFILE.at((10.0, 16.0, 24.0), rows) == pytest.approx(value)


def test_a_micro_batch_of_several_amounts_costs_what_these_add(tmp_path):
    pieces = [
        Piece(f"block {i}", (1.0, 0.5, 3.0), (2.0, 0.0, 0.0), (8.0, 1.0, 0.0), (4.0, 0.0, 0.0), 7)
        for i in range(2)
    ]
    nothing = replace(pieces[0], forward=(0.0,) * 3, backward=(0.0,) * 3)
    made = make_profile(pieces, nothing, nothing, bandwidth=1e3)
    profile = replace(made, rows=(), amounts=("nodes", "edges"))
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    size = Amounts(10, (40,), padded_rows=16)
    request = Request(2, 1, 3, (3,), typical=size)
    costs = stage_costs(profile, request, ((0,), (1,)), 3)
    assert costs.forward == [[10 + 20 + 3] * 3] * 2
    assert costs.backward == [[20.0] * 3] * 2
    assert costs.features == [16 * 4 / 1e3]  # with the padding
    (best, *_) = search(profile, request)
    assert best.stages == ((0,), (1,))
    assert request.num_samples(3) == 30
    for wrong, says in (
        (replace(profile, amounts=()), "rows are"),
        (replace(profile, amounts=("a b",)), "amounts are"),
    ):
        write_profile(wrong, tmp_path / "other.json")
        with pytest.raises(InputError, match=says):
            read_profile(tmp_path / "other.json")


def test_a_profile_from_before_there_were_amounts_is_read(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    table = json.loads(path.read_text())
    del table["amounts"]
    path.write_text(json.dumps(table))
    assert read_profile(path) == PROFILE


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: cannot be read \(No such file"):
        read_profile(tmp_path / "none.json")
    for text in ("{", "[" * 100_000, "\x00"):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(InputError, match=r"broken\.json: not a JSON file"):
            read_profile(tmp_path / "broken.json")


# What is changed, to which value, and words of the message.
IMPOSSIBLE = [
    (["rows"], [], "rows are"),
    (["rows"], [2, 1, 4], "rows are"),
    (["rows"], [1, 2, 4.5], "rows are"),
    (["rows"], 3, "'int' object is not iterable"),
    (["blocks"], [], "no blocks"),
    (["blocks", 0, "forward"], [1.0, 2.0], "block 0: forward has not one value"),
    (["blocks", 0, "forward"], [1.0, 2.0, -3.0], "block 0: forward holds -3.0"),
    (["blocks", 0, "backward"], [1.0, 2.0, float("nan")], "block 0: backward holds nan"),
    (["blocks", 0, "parameter_bytes"], 1.5, "block 0: parameter_bytes is 1.5"),
    (["blocks", 0, "colour"], "red", "colour"),
    (["stem"], [], "of a piece is amiss"),
    (["slowdown"], [], "slowdown is"),
    (["slowdown"], [0.1], "slowdown is"),
    (["rounds"], [[1.0, 1.2], []], "rounds are"),
    (["rounds"], [[0.0]], "rounds are"),
    (["bandwidth"], 0, "bandwidth is 0"),
    (["latency_seconds"], "fast", "latency_seconds is 'fast'"),
    (["base_bytes"], -1, "base_bytes is -1"),
    (["options"], [], "options is not a table"),
    (["colour"], "red", "'colour' is amiss"),
]


def test_impossible_profiles(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    check_changes(IMPOSSIBLE, read_profile, path, "is not a profile")


def test_a_profile_serves_its_own_model_and_options_only():
    profile = replace(PROFILE, options={"dtype": "float32", "image_size": "32"})
    check_options(profile, "p.json", "made", {"dtype": "float32", "image_size": "32"})
    with pytest.raises(InputError, match=r"p\.json: is a profile of 'made', but --model is 'vig'"):
        check_options(profile, "p.json", "vig", {})
    with pytest.raises(InputError, match=r"measured with dtype = float32.* dtype = bfloat16"):
        check_options(profile, "p.json", "made", {"dtype": "bfloat16", "image_size": "32"})
    with pytest.raises(InputError, match="image_size = 32, but this run has image_size = None"):
        check_options(profile, "p.json", "made", {"dtype": "float32"})
