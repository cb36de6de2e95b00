"""What the user is told when ranks have ended, and the exit code."""

import pytest

from vigpipe.launch.causes import Cause, find_cause


@pytest.mark.parametrize(
    ("exit_codes", "records", "code"),
    [
        ({1: 70, 0: 2}, [{"kind": "lost peer", "code": 70}, {"kind": "own", "code": 2}], 2),
        ({1: -11, 0: 70}, [{"kind": "lost peer", "code": 70}], 139),
        ({0: -15}, [], 143),  # somebody ended one rank by hand
        ({0: 70}, [{"kind": "lost peer", "code": 70}], 70),
        ({1: 76}, [], 76),
        ({0: 255, 1: 255}, [], 70),
    ],
)
def test_exit_code(exit_codes, records, code):
    told = [{"rank": 0, "message": "it is gone", **record} for record in records]
    assert find_cause(exit_codes, told, frozen=()).code == code


def test_a_rank_that_is_gone_or_frozen_is_the_cause_of_what_others_tell():
    lost = [{"rank": 0, "kind": "lost peer", "code": 70, "message": "closed"}]
    killed = Cause(137, "rank 1 was ended by SIGKILL; out of memory?")
    assert find_cause({0: 70, 1: -9}, lost, frozen={2}) == killed
    frozen = Cause(70, "rank 1 answered no more, and was killed; was it stopped?")
    assert find_cause({0: 70}, lost, frozen={1}) == frozen
    both = "rank 1 and rank 2 answered no more, and were killed; were they stopped?"
    assert find_cause({0: 70}, lost, frozen={2, 1}) == Cause(70, both)
    assert find_cause({0: 70}, lost, frozen=()) == Cause(70, "rank 0 lost a peer: closed")


def test_a_rank_has_told_of_its_own_failure():
    own = [{"rank": 0, "kind": "own", "code": 2, "message": "the flag is wrong"}]
    assert find_cause({0: 2, 1: -9}, own, frozen=()) == Cause(2)
