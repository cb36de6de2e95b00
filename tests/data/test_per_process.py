import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from vigpipe.data.per_process import PerProcess
from vigpipe.errors import InputError

OPENED = []


def open_lock(name):
    """Returns what cannot be pickled."""
    OPENED.append(name)
    return threading.Lock()


def fail():
    OPENED.append("fail")
    raise InputError("it is not there")


@pytest.fixture(autouse=True)
def _none_opened():
    OPENED.clear()


def test_it_is_opened_when_it_is_first_asked_for_and_then_kept():
    opened = PerProcess(partial(open_lock, "a"))
    assert not OPENED
    with ThreadPoolExecutor(8) as threads:
        locks = set(threads.map(lambda _: opened(), range(100)))
    assert (len(locks), OPENED) == (1, ["a"])


def test_a_pickle_opens_it_again():
    opened = PerProcess(partial(open_lock, "a"))
    first = opened()
    again = pickle.loads(pickle.dumps(opened))
    assert again() is not first
    assert OPENED == ["a", "a"]


def test_after_a_failure_it_is_tried_again():
    opened = PerProcess(fail)
    for _ in range(2):
        with pytest.raises(InputError):
            opened()
    assert len(OPENED) == 2
