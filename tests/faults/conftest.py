"""The folder in which the commands of these tests find their images."""

import contextlib

import pytest

from tests.small_digits import write_small_digits


@pytest.fixture(scope="module", autouse=True)
def _data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_small_digits(folder)
    with contextlib.chdir(folder):
        yield
