"""Every format from the command line, and paths that no format knows."""

import json
import pickle

import numpy as np
import pytest

from tests.data.formats.small_sets import (
    LABELS,
    keras_arrays,
    noise,
    write_idx,
    write_npz,
    write_parquet,
    write_saved,
)
from tests.data.refusals import check_refusals
from vigpipe.cli import main
from vigpipe.data import formats, open_source

WRITE = {
    "idx": write_idx,
    "npz": lambda folder: write_npz(folder / "x.npz", keras_arrays(3)),
    "arrow": write_saved,
    "parquet": write_parquet,
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", WRITE)
def test_two_steps_of_training_and_an_evaluation(tmp_path, kind):
    path, out = WRITE[kind](tmp_path), tmp_path / "out"
    options = ["--model", "vig_digits", "--batch-size", "6", "--steps", "2", "--threads", "1"]
    assert main(["train", "--data", str(path), *options, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["data"], summary["steps"], summary["test"]["images"]) == (str(path), 2, 6)


@pytest.mark.parametrize("kind", WRITE)
def test_a_split_is_read_alike_after_it_was_pickled_for_a_worker(tmp_path, kind):
    source = open_source(str(WRITE[kind](tmp_path)))
    train = pickle.loads(pickle.dumps(source.train))
    channels = (3,) if kind != "idx" else (1,)
    expected = noise("train", *channels[: kind != "idx"]).reshape(12, 8, 8, *channels)
    x = train.read(range(12)).movedim(1, -1).numpy()
    np.testing.assert_array_equal((x * 255).round().astype(np.uint8), expected)
    assert train.labels.tolist() == LABELS["train"].tolist()


def test_other_files_and_folders_are_refused_with_what_may_be_given(tmp_path):
    for name in ("x.h5", "x.parquet", "x.arrow"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.npz").mkdir()
    rows = [
        ("x.h5", r"x.h5: is no data set; give a folder .* \.npz file"),
        ("x.parquet", "x.parquet: is no data set"),
        ("x.arrow", "x.arrow: is no data set"),
        ("x.npz", "is not a regular file"),
        ("empty", "has no folder train/; images are expected as"),
    ]
    check_refusals(rows, lambda name: formats.read(tmp_path / name))
