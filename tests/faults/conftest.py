"""The folder in which the commands of these tests find their images."""

import pytest

from tests.small_digits import among_small_digits


@pytest.fixture(scope="module", autouse=True)
def _data(tmp_path_factory):
    with among_small_digits(tmp_path_factory.mktemp("data")):
        yield


@pytest.fixture
def folder(tmp_path):
    """Where the run goes."""
    return tmp_path / "run"
