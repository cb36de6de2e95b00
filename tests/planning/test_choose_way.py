"""What the ways to use ranks on a graph take, and which is chosen."""

from dataclasses import replace

import pytest

from tests.planning.measured import HALO, LAYERS, MB, MIXED, ONE, REPLICAS, make_measured
from vigpipe.errors import InputError
from vigpipe.planning.choose_way import Cluster, at, choose, predict_way


def outcome(way, **cluster):
    return predict_way(way, make_measured(), Cluster(**cluster))


def test_messages_of_this_machine_take_what_its_ranks_took():
    parts = outcome(MIXED).parts
    assert (parts.computing, parts.slow_cores) == pytest.approx((6.0, 0.6))
    # Ten exchanges of 1.5 ms, four of 3 ms, and three sums of 2 ms.
    assert parts.messages == pytest.approx(0.015 + 0.012 + 0.006)
    assert parts.agreement == pytest.approx(0.005 + 0.003)  # and a sum of 2 MB
    assert outcome(MIXED).sent_bytes == 26 * MB + 2 * 2 * MB


def test_messages_of_a_network_take_latency_and_bytes():
    parts = outcome(MIXED, latency_seconds=0.1, bandwidth=1e6).parts
    # 13 MB in 14 exchanges; each sum of m = 2 goes 2 times a way, with half of its bytes.
    assert parts.messages == pytest.approx(14 * 0.1 + 13.0 + 3 * (0.2 + 1.0))
    assert parts.agreement == pytest.approx(0.2 + 0.2 + 2.0)


def test_more_ranks_than_have_measured_take_more_turns():
    four = replace(MIXED, num_ranks=4, exchanges=((0.0, 1),), sums=(), seconds=(3.0,) * 4)
    parts = outcome(four).parts
    assert parts.messages == pytest.approx(3 * 1e-3)  # three others instead of one
    # The sum of 2 MB, of 1 + 2 ms for two ranks, has 3 / 4 of the bytes instead of 1 / 2.
    assert parts.agreement == pytest.approx(3 * 5e-3 + 3 * 1e-3 + 1.5 * 2e-3)


def test_ranks_on_hosts_of_their_own_do_not_slow_one_another_down():
    assert outcome(MIXED, ranks_per_host=1).parts.slow_cores == 0
    assert outcome(replace(MIXED, num_ranks=4)).parts.slow_cores == pytest.approx(7.2)  # 2 × 6.6


def test_a_pipeline_of_one_microbatch_takes_as_long_as_one_rank():
    found = outcome(LAYERS)
    # Its pieces take 4 × 3 s together, as the step of one rank does; two transfers come on top.
    assert found.step_seconds == pytest.approx(12 + 5e-3 + 2 * 100 / 1e9)
    assert found.parts.computing == pytest.approx(6)
    assert found.sent_bytes == 200
    slower = predict_way(LAYERS, make_measured(replace(ONE, seconds=(18.0,)), LAYERS), Cluster())
    assert slower.step_seconds == pytest.approx(18 + 5e-3, rel=1e-6)


def test_the_fastest_way_with_the_steps_of_one_rank_is_taken():
    choice = choose(make_measured(), Cluster())
    assert choice.best.way is MIXED
    assert choice.reason == (
        "Take mixed: 6.64 s an epoch, the least of 4 ways whose steps are those of one rank. Of "
        "the others, one rank takes 12 s, with all the work on it; halo takes 7.72 s: with its "
        "halo the fullest part sums over 1.90 times its rows; layers takes 12 s: its ranks wait "
        "for one another in 50% of a step (the bubble, and transfers). With other steps an epoch "
        "is quicker: replicas of parts, 4.56 s in 20."
    )


def test_a_memory_limit_changes_the_choice():
    tight = make_measured(ONE, replace(MIXED, peak_bytes=80 * MB), HALO)
    assert choose(tight, Cluster(memory_limit_bytes=80 * MB)).best.way.name == "mixed"
    choice = choose(tight, Cluster(memory_limit_bytes=75 * MB))
    assert choice.best.way is HALO
    assert "mixed needs 80.0 MB of memory a rank, and the limit is 75.0 MB" in choice.reason
    assert [found.fits for found in choice.outcomes] == [False, False, True]
    with pytest.raises(InputError, match=r"--memory-limit 9.0 MB: .* halo, needs 70.0 MB"):
        choose(tight, Cluster(memory_limit_bytes=9 * MB))


def test_a_narrow_network_changes_the_choice():
    bandwidths = 1e9, 2e6, 1e5
    chosen = [choose(make_measured(), Cluster(bandwidth=each)) for each in bandwidths]
    assert [choice.best.way.name for choice in chosen] == ["mixed", "halo", "one rank"]
    assert "mixed takes 15.6 s: messages are 51% of a step, 30.0 MB" in chosen[1].reason


def test_what_cannot_be_is_said_and_never_taken():
    cannot = replace(MIXED, why_not="a layer has nodes of its own", seconds=())
    choice = choose(make_measured(ONE, cannot), Cluster())
    assert choice.best.way is ONE
    assert choice.reason == (
        "Take one rank: 12 s an epoch. Of the others, mixed cannot be: a layer has nodes of its "
        "own."
    )
    with pytest.raises(InputError, match=r"--ranks 2: no way .* here .one rank: large"):
        choose(make_measured(replace(ONE, why_not="large"), REPLICAS), Cluster())


def test_a_curve_is_linear_between_its_points_and_does_not_fall_beyond_them():
    curve = (1000, 2.0), (2000, 4.0), (3000, 3.0)
    assert [at(curve, x) for x in (0, 1000, 1500, 2500, 9000)] == [2.0, 2.0, 3.0, 3.5, 3.0]
    assert at(((10, 1.0), (20, 2.0)), 40) == pytest.approx(4.0)
    assert at(((0, 0.0),), 1e9) == 0
