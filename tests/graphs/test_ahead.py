"""What comes next is made in a thread: the same values, few at a time, errors when asked for."""

import threading

import pytest

from vigpipe.graphs.ahead import Ahead

GUARD = 60.0  # seconds to wait for an event


def test_values_are_those_of_their_numbers_whatever_was_said_to_follow():
    ahead = Ahead(lambda number: number**2, 2)
    for number, following in [(3, [4, 5, 6]), (4, [5, 6]), (9, [2]), (5, []), (2, [3]), (7, [3])]:
        assert ahead.take(number, following) == number**2
    ahead.close()
    assert ahead.take(8, [9]) == 64  # a new thread
    ahead.close()


def test_what_follows_is_made_in_one_other_thread_and_once():
    made, has_made = [], {number: threading.Event() for number in range(9)}

    def make(number):
        made.append((number, threading.current_thread() is threading.main_thread()))
        has_made[number].set()
        return number

    ahead = Ahead(make, 2)
    ahead.take(0, [1, 2, 3, 4])
    assert all(has_made[number].wait(GUARD) for number in (1, 2))
    assert not has_made[3].is_set()  # no more than two
    ahead.take(1, [2, 3])
    assert has_made[3].wait(GUARD)
    ahead.take(2, [3])
    ahead.take(3, [])
    assert made == [(0, True), (1, False), (2, False), (3, False)]
    ahead.close()


def test_an_error_comes_when_its_value_is_asked_for():
    def make(number):
        if number == 2:
            raise OSError("number 2")
        return number

    ahead = Ahead(make, 1)
    assert ahead.take(1, [2]) == 1
    with pytest.raises(OSError, match="number 2"):
        ahead.take(2, [3])
    assert ahead.take(1, [2]) == 1
    assert ahead.take(3, [4]) == 3  # nobody asks for 2
    ahead.close()


def test_closing_ends_the_thread_and_waits_for_what_it_does():
    begun, may_go_on, ended, threads = threading.Event(), threading.Event(), [], []

    def make(number):
        if number:
            threads.append(threading.current_thread())
            begun.set()
            assert may_go_on.wait(GUARD)
            ended.append(number)
        return number

    ahead = Ahead(make, 2)
    ahead.take(0, [1, 2])
    assert begun.wait(GUARD)
    ahead._coming[2].add_done_callback(lambda _: may_go_on.set())  # when it is cancelled
    ahead.close()
    assert ended == [1]  # the second was not begun
    assert not threads[0].is_alive()
