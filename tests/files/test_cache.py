"""Where is kept what can be made again."""

import stat
from pathlib import Path

import pytest

from vigpipe.files.cache import cache_folder


@pytest.fixture(autouse=True)
def _unnamed(monkeypatch):
    for name in ("VIGPIPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_cache_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cache_folder()
    assert folder == tmp_path / "cache" / "vigpipe"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    """Symptom: a traceback from Path.home(), a RuntimeError, instead of the plain operators."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OSError, match=r"home directory.*VIGPIPE_CACHE"):
        cache_folder()
