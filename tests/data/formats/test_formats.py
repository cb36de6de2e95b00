"""Formats from the command line, and paths that no format knows."""

import json

import pytest

from tests.data.formats.small_sets import (
    keras_arrays,
    write_npz,
    write_parquet,
)
from tests.refusals import check_refusals
from vigpipe.cli import main
from vigpipe.data import formats

WRITE = {
    "npz": lambda folder: write_npz(folder / "x.npz", keras_arrays()),
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


def test_other_files_and_folders_are_refused_with_what_may_be_given(tmp_path):
    (tmp_path / "x.h5").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.npz").mkdir()
    rows = [
        ("x.h5", r"x.h5: is no data set; give a folder .* \.npz file"),
        ("x.npz", "is not a regular file"),
        ("empty", "has no class folders; images are expected as"),
    ]
    check_refusals(rows, lambda name: formats.read(tmp_path / name))
