"""The sentences, whichever way the numbers point."""

import pytest

from benchmarks.study.claims import (
    difference,
    loss_of_microbatches,
    loss_of_stages,
    speedup,
    synchronisation,
    two_paragraphs,
)
from tests.benchmarks.study.outcomes import make_outcome


@pytest.mark.parametrize(
    ("whole", "pieces", "stages", "held", "said", "unsaid"),
    [
        (4.0, 3.0, 2.0, True, ["2.00× as fast as the whole", "1.33× as fast", "1.50× as fast",
          "make 42% of it and pipelining 58%", "as much or more"], ["gain", "beyond"]),
        (3.0, 2.0, 2.5, False, ["1.20× as fast", "less", "pipelining gains nothing"],
         ["make ", "smaller micro-batches alone gain"]),
        (3.0, 4.0, 2.5, False, ["0.75× as fast", "micro-batches alone gain nothing"],
         ["make ", "pipelining gains"]),
        (4.0, 3.9, 2.0, True, ["1.95× as fast", "beyond"], ["gain nothing"]),
    ],
)  # fmt: skip
def test_the_speed_up_is_told_apart(whole, pieces, stages, held, said, unsaid):
    outcome = make_outcome({"sequential": whole, "accumulated-5": pieces, "2x5": stages})
    verdict = speedup(outcome)
    assert verdict.held is held
    assert all(part in verdict.text for part in [*said, "more than 1.67×"]), verdict.text
    assert not any(part in verdict.text for part in unsaid), verdict.text
    assert "share" not in verdict.text


def test_rounds_give_a_spread_and_drift_cancels():
    seconds = {"sequential": 4.0, "accumulated-5": 3.0, "2x5": 2.0}
    text = speedup(make_outcome(seconds, rounds=(1.0, 3.0, 2.0))).text
    assert "2.00× (2.00 – 2.00) as fast as the whole" in text


def test_ranks_that_share_cores_are_told_with_the_simulated_ratio():
    seconds = {"sequential": 4.0, "accumulated-5": 3.0, "2x5": 4.0}
    text = speedup(make_outcome(seconds, num_cores=1)).text
    # The ceiling: all transfers but two are hidden.
    assert "(they share 1 core; simulated with cores for every rank: 1.67×)" in text
    assert "they share" not in speedup(make_outcome(seconds, num_cores=2)).text


def test_without_the_second_baseline_nothing_is_told_apart():
    verdict = speedup(make_outcome({"sequential": 4.0, "2x5": 2.0}))
    assert verdict.held
    assert "accumulated-5 would show" in verdict.text


ALL = {"sequential": 4.0, "accumulated-5": 3.0, "accumulated-10": 3.0, "2x5": 2.0, "2x2x5": 1.5}


@pytest.mark.parametrize(
    ("own", "held", "said"),
    [
        ((3.0, 2.0, 1.0), True, "pipelines (2x5): equal bit for bit"),
        ((3.0, 2.0, 1.000001), True, "pipelines (2x5): at most 1.0e-06 apart"),
        ((3.0, 2.2, 1.0), False, "pipelines (2x5): at most 10.0% apart"),
    ],
)
def test_stages_are_held_to_the_same_microbatches(own, held, said):
    losses = {"2x5": own, "sequential": (9.0, 9.0, 9.0)}
    verdict = loss_of_stages(make_outcome(ALL, losses, rounds=(1.0, 1.0)))
    assert verdict.held is held
    assert said in verdict.text
    assert "copies (2x2x5): equal bit for bit" in verdict.text
    assert "over 3 steps of 2 rounds" in verdict.text
    assert ("more than the 1e-05" in verdict.text) is not held


@pytest.mark.parametrize(("last", "held"), [(1.0, True), (1.5, False), (0.5, False)])
def test_microbatches_are_held_to_the_whole_mini_batch(last, held):
    losses = {"accumulated-10": (3.0, 2.0, last)}
    verdict = loss_of_microbatches(make_outcome(ALL, losses))
    assert verdict.held is held
    assert ("BatchNorm" in verdict.text) is not held
    if not held:
        assert "is 50.0%, of accumulated-10 at step 3; at the last step it is 50.0%" in verdict.text


def test_the_largest_difference_may_come_before_the_last_step():
    losses = {"2x5": (3.3, 2.0, 1.01)}
    largest, step, last = difference(make_outcome(ALL, losses), "2x5", "sequential")
    assert (largest, step, last) == (pytest.approx(0.1), 1, pytest.approx(0.01))


@pytest.mark.parametrize(("seconds", "held"), [(0.003, True), (0.3, False)])
def test_synchronisation_is_measured_on_the_copy_that_waits_for_nobody(seconds, held):
    verdict = synchronisation(make_outcome(ALL, all_reduce=seconds))
    assert verdict.held is held
    assert f"{1e3 * seconds:.2f} ms of a step of 2x2x5, {seconds / 1.5:.2%}" in verdict.text
    assert f"comes first spends {seconds / 0.75:.2%}" in verdict.text
    assert "decides" not in verdict.text


def test_where_ranks_share_cores_the_simulated_synchronisation_decides():
    verdict = synchronisation(make_outcome(ALL, all_reduce=0.3, num_cores=2))
    assert verdict.held
    assert "4 ranks on 2 cores also wait for a core" in verdict.text


def test_every_claim_is_in_one_paragraph():
    page = two_paragraphs(make_outcome(ALL, {"sequential": (9.0, 9.0, 9.0)}, all_reduce=0.001))
    held, failed = page.split("\n\n")
    assert held.startswith("**What held.** *1.96×")
    assert "stages and copies" in held
    assert "Synchronising" in held
    assert failed.startswith("**What did not hold.** *Micro-batches leave")


def test_claims_without_their_layouts_are_not_judged():
    held, failed, missing = two_paragraphs(make_outcome({"2x5": 1.0})).split("\n\n")
    assert held == "**What held.** None of the claims that were looked at."
    assert failed == "**What did not hold.** None of the claims that were looked at."
    assert missing.count("needs") == 4
