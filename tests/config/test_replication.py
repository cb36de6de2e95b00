"""Options about replicas: what is filled in, and what does not go together."""

from dataclasses import replace
from pathlib import Path

import pytest

from vigpipe.config.options import TrainConfig
from vigpipe.config.replication import with_replication_defaults
from vigpipe.errors import InputError

PERIODIC = TrainConfig(strategy="periodic", dp=2)
GOSSIP = TrainConfig(strategy="gossip", dp=3)


def test_what_the_user_leaves_open_is_filled_in():
    resolved = with_replication_defaults(PERIODIC)
    found = resolved.average_every, resolved.average, resolved.items, resolved.final
    assert found == (20, "weights", "fixed", "mean")
    assert (resolved.outer_lr, resolved.outer_momentum) == (None, None)
    outer = with_replication_defaults(replace(PERIODIC, average="outer", outer_momentum=0.9))
    assert (outer.outer_lr, outer.outer_momentum) == (1.0, 0.9)
    assert (resolved.pairs, resolved.answer) == (None, None)
    gossip = with_replication_defaults(GOSSIP)
    assert (gossip.average, gossip.pairs, gossip.answer) == ("weights", "any", "item")


@pytest.mark.parametrize(
    "config", [TrainConfig(), PERIODIC, replace(PERIODIC, average="outer"), GOSSIP]
)
def test_options_that_are_resolved_stay_as_they_are(config):
    """A run's config.toml starts the same run again."""
    resolved = with_replication_defaults(config)
    assert with_replication_defaults(resolved) == resolved


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(average_every=5), "--average-every 5: says how replicas that take steps"),
        (TrainConfig(items="pool"), "--items pool: says how"),
        (TrainConfig(final="mean"), "--final mean: says how"),
        (TrainConfig(replay=Path("runs/a")), "--replay runs/a: does again what replicas"),
        (replace(PERIODIC, sync="drain"), "--sync drain: .* leave it out"),
        (replace(PERIODIC, elastic=True), "--elastic: changes the number of replicas"),
        (replace(PERIODIC, outer_lr=1.0), "--outer-lr 1.0: is for --average outer"),
        (
            replace(PERIODIC, average="gradients", outer_momentum=0.5),
            "--outer-momentum 0.5: is for --average outer, and --average is gradients",
        ),
        (replace(PERIODIC, final="best"), "--final best: the validation images choose"),
        (replace(PERIODIC, timing=True), "--timing: accounts for steps"),
        (TrainConfig(pairs="any"), "--pairs any: says how"),
        (replace(PERIODIC, answer="item"), "--answer item: is for --strategy gossip"),
        (replace(GOSSIP, average="outer"), "--average outer: needs the mean of all replicas"),
        (replace(GOSSIP, outer_lr=1.0), "--outer-lr 1.0: is for --average outer"),
        (replace(GOSSIP, pairs="sets"), "must be even, and --dp is 3; choose --pairs any"),
        (replace(GOSSIP, pairs="sets", dp=2, answer="interval"), "--answer interval: with --pairs"),
        (replace(PERIODIC, trace=True), "--trace: accounts for steps"),
    ],
)
def test_what_does_not_go_together_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        with_replication_defaults(config)
