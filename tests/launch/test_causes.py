"""What the user is told when ranks have ended, and the exit code."""

from vigpipe.launch.causes import Cause, find_cause


def test_a_rank_that_is_gone_or_frozen_is_the_cause_of_what_others_tell():
    lost = [{"rank": 0, "kind": "lost peer", "code": 70, "message": "closed"}]
    killed = Cause(137, "rank 1 was ended by SIGKILL; out of memory?")
    assert find_cause({0: 70, 1: -9}, lost, frozen={2}) == killed
    frozen = Cause(70, "rank 1 answered no more, and was killed; was it stopped?")
    assert find_cause({0: 70}, lost, frozen={1}) == frozen
    both = "rank 1 and rank 2 answered no more, and were killed; were they stopped?"
    assert find_cause({0: 70}, lost, frozen={2, 1}) == Cause(70, both)
    assert find_cause({0: 70}, lost, frozen=()) == Cause(70, "rank 0 lost a peer: closed")
