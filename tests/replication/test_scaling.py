"""More replicas or fewer: both rules and the prediction, as tables of cases."""

import pytest

from vigpipe.replication.scaling import Reading, predict, published, safer, sentences

FLAT = [100.0] * 5


# ---- the published rule ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "num_replicas", "expected"),
    [
        ([100.0] * 9, 4, 4),
        ([100.0] * 10, 4, 5),
        ([*FLAT, *[104.9] * 5], 4, 5),
        ([*FLAT, *[105.0] * 5], 4, 4),  # exactly 5 % still grows
        ([*FLAT, 90.0, 95.0, 100.0, 105.0, 110.0], 4, 5),  # means, not single readings
        ([1.0] * 90 + FLAT + [120.0] * 5, 4, 4),  # only the last 10 count
        ([100.0] * 10, 15, 16),
        ([100.0] * 10, 16, 16),  # the most
        ([0.0] * 10, 4, 4),
        ([*FLAT, *[0.0] * 5], 4, 5),  # the rule adds one when throughput falls, too
    ],
)
def test_the_published_rule_adds_a_replica_when_throughput_is_flat(
    readings, num_replicas, expected
):
    assert published(readings, num_replicas).num_replicas == expected


# ---- the safer rule -------------------------------------------------------------------------


def history(*stretches: tuple[int, float, int]) -> list[Reading]:
    """Make readings of stretches: number of replicas, images/s, how many readings."""
    return [Reading(number, rate) for number, rate, count in stretches for _ in range(count)]


@pytest.mark.parametrize(
    ("stretches", "expected"),
    [
        # Without a change.
        ([(4, 100, 4)], 4),
        ([(4, 100, 5)], 5),
        # One more: it must bring 0.5 / p.
        ([(4, 100, 9), (5, 150, 4)], 5),
        ([(4, 100, 9), (5, 112.5, 5)], 6),
        ([(4, 100, 9), (5, 112.4, 5)], 4),
        ([(4, 100, 2), (5, 120, 5)], 6),  # fewer than 5 before: what there is
        ([(4, 50, 9), (4, 100, 5), (5, 60, 9), (5, 120, 5)], 6),  # the last 5 of each
        # Several more at once: as much for each.
        ([(4, 100, 9), (8, 150, 5)], 9),
        ([(4, 100, 9), (8, 149, 5)], 4),
        # A throughput of 0 cannot be compared with.
        ([(4, 0, 9), (5, 100, 5)], 5),
        ([(4, 100, 9), (5, 0, 5)], 4),
        # Back, and hold off.
        ([(4, 100, 9), (5, 105, 5), (4, 100, 19)], 4),
        ([(4, 100, 9), (5, 105, 5), (4, 100, 20)], 5),
        ([(16, 100, 9), (15, 50, 5), (16, 100, 20)], 16),
        # Tried again, which is no way back.
        ([(4, 100, 9), (5, 105, 5), (4, 100, 20), (5, 105, 5)], 4),
        ([(4, 100, 9), (5, 105, 5), (4, 100, 20), (5, 105, 5), (4, 100, 5)], 4),
        # Two that paid, and a third.
        ([(4, 100, 9), (5, 125, 9), (6, 150, 5)], 7),
        # Fewer: they may cost less than 0.5 / p each.
        ([(5, 100, 9), (4, 95, 5)], 4),
        ([(5, 100, 9), (4, 90, 5)], 5),
        ([(4, 100, 9), (2, 70, 5)], 4),
        ([(5, 100, 9), (4, 80, 5), (5, 100, 20)], 6),
    ],
)
def test_the_safer_rule_keeps_only_what_pays(stretches, expected):
    assert safer(history(*stretches)).num_replicas == expected


def test_a_rule_says_why():
    assert published([*FLAT, *[101.0] * 5], 4).why == (
        "The last 5 readings differ by +1.0% from the 5 before, less than 5.0%: one more replica."
    )
    assert safer(history((5, 100, 9), (4, 95, 5))).why == (
        "From 5 to 4 replicas throughput changed by −5.0%, a loss of less than 10.0%: keep 4."
    )


# ---- the prediction -------------------------------------------------------------------------


def account(busy: float, waiting: float, averaging: float, samples: float = 1000) -> dict:
    seconds = {"waiting_seconds": waiting, "averaging_seconds": averaging}
    return {"samples": samples, "busy_seconds": busy, **seconds}


@pytest.mark.parametrize(
    ("each", "options", "expected"),
    [
        # D replicas that cost one another nothing.
        ([account(10, 0, 0)] * 4, {}, (400, 500, 300)),
        # Averages of all: 2 (D - 1) / D, so 1, 4/3, 3/2 for 2, 3, 4 replicas.
        ([account(4, 3, 3)] * 2, {}, (200, 3 * 1000 / 11, 250)),  # alone, nobody waits or averages
        ([account(4, 2, 4)] * 3, {}, (300, 4 * 1000 / 10.5, 2 * 1000 / 9)),
        # Averages of two take as long.
        ([account(4, 2, 4)] * 3, {"averages_all": False}, (300, 400, 200)),
        # A new replica is like the mean one.
        ([account(10, 0, 0), account(40, 0, 0)], {}, (125, 187.5, 62.5)),
        # A server that is idle for half of its time could do twice as much; one that never is, no
        # more, and with a worker fewer the others wait less.
        ([account(8, 1, 1)] * 2, {"server": account(4, 5, 1)}, (200, 300, 1000 / 9.5)),
        ([account(8, 1, 1)] * 4, {"server": account(6, 1, 3)}, (400, 4000 / 9, 3 * 1000 / 9.1)),
        ([account(4, 5, 1)] * 4, {"server": account(7, 0, 3)}, (400, 400, 400)),
        ([account(7, 2, 1)] * 4, {"server": account(7, 0, 3)}, (400, 400, 375)),
        ([account(9, 0, 1)], {"server": account(2, 8, 0)}, (100, 200, None)),
        ([account(9, 0, 1)], {"server": account(0, 10, 0)}, (100, 200, None)),
        # Nothing to tell from.
        ([account(9, 1, 0)], {}, None),
        ([account(9, 1, 0, samples=0)] * 3, {}, None),
        ([], {}, None),
    ],
)
def test_one_more_and_one_fewer_are_predicted_from_the_seconds(each, options, expected):
    prediction = predict(each, **options)
    if expected is None:
        assert prediction is None
        return
    assert prediction is not None
    assert prediction.num_replicas == len(each)
    for number, wanted in zip(prediction[1:4], expected, strict=True):
        assert number == (None if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize(
    ("each", "server", "more_pays", "fewer_pays"),
    [
        ([account(10, 0, 0)] * 4, None, True, False),
        ([account(4, 3, 3)] * 2, None, True, True),  # averages and waits are most of the time
        ([account(4, 5, 1)] * 4, account(7, 0, 3), False, True),
        ([account(8, 1, 1)] * 2, account(8, 2, 0), True, False),  # exactly 0.5 / D is enough
        ([account(9, 0, 1)], account(2, 8, 0), True, False),
    ],
)
def test_a_replica_pays_if_it_brings_half_of_its_share(each, server, more_pays, fewer_pays):
    prediction = predict(each, server)
    assert prediction is not None
    assert (prediction.more_pays, prediction.fewer_pays) == (more_pays, fewer_pays)
    table = prediction.as_table()
    assert (table["more_pays"], table["fewer_pays"]) == (more_pays, fewer_pays)
    assert table["with_one_more"] == prediction.with_one_more


def test_a_prediction_is_told_in_sentences():
    full = predict([account(4, 5, 1)] * 4, account(7, 0, 3))
    assert full is not None
    assert [sentence.split(": ")[1] for sentence in sentences(full)] == [
        "it does not pay, for 12.5% is what it must bring.",
        "it pays, for it costs less than 12.5%.",
    ]
