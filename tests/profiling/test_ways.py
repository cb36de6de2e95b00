"""Every way to use ranks on a graph, rehearsed without the other ranks."""

from dataclasses import replace

import pytest
import torch

from tests.graphs.split.test_switch import GAT, GCN, SAGE, traffic
from tests.profiling.quick import CPU, FEWEST
from tests.world import run_each, run_ranks
from vigpipe.config.options import TrainConfig
from vigpipe.errors import InputError
from vigpipe.planning.choose_way import Cluster, choose
from vigpipe.profiling import links, ways
from vigpipe.profiling.rehearse import Rehearsal
from vigpipe.profiling.ways import arrange, list_ways, measure_ways, on_one_rank
from vigpipe.run.facts import prepare

SMALL = TrainConfig(model="gcn", data="sbm:400,4,12,6", layers=3, width=16, threads=1)
AS_FEW = [
    *FEWEST,
    *((ways, name, value) for name, value in (("NUM_ROUNDS", 1), ("ENOUGH_SECONDS", 0.0))),
    *((links, name, 1) for name in ("NUM_ROUNDS", "NUM_WARMUP")),
]


@pytest.fixture
def quick(monkeypatch):
    for module, name, value in AS_FEW:
        monkeypatch.setattr(module, name, value)


def alone(config):
    return on_one_rank(prepare(config, torch.float32), config)


def names(config, num_ranks):
    return {c.name: c for c in list_ways(alone(config).config, num_ranks)}


def test_parts_and_more_microbatches_are_other_steps_than_the_whole_graph():
    found = names(SMALL, 4)
    assert {name for name, way in found.items() if way.is_same} == {
        *("one rank", "mixed", "halo", "layers")
    }
    assert found["replicas of parts"].options == {"sampler": "parts", "dp": 4}
    assert found["layers, many parts"].options == {
        **{"sampler": "parts", "stages": 4, "microbatches": 16}
    }


@pytest.mark.parametrize(
    ("number", "replicas", "is_same"), [(1, 1, False), (8, 2, True), (6, 1, False)]
)
def test_replicas_that_share_the_sub_graphs_of_a_step_take_that_step(number, replicas, is_same):
    found = names(replace(SMALL, sampler="parts", parts=20, microbatches=number), 4)
    assert "halo" not in found
    assert found["replicas"].options == {"dp": 4, "microbatches": replicas}
    assert found["replicas"].is_same == is_same
    assert ("layers, more at once" in found) == (number == 1)


def test_a_way_that_is_refused_has_a_reason(quick):
    run = alone(replace(SMALL, sampler="fastgcn"))
    found = {way.name: way for way in measure_ways(run, 0, CPU, 4).ways}
    assert "every layer has nodes of its own" not in found["one rank"].why_not
    assert "with --sampler fastgcn every layer has nodes of its own" in found["mixed"].why_not
    assert "4 stages for 3 blocks" in found["layers"].why_not


def test_a_single_rank_measures_all_ways(quick):
    measured = measure_ways(alone(SMALL), 0, CPU, 2)
    found = {way.name: way for way in measured.ways}
    assert not [way.why_not for way in measured.ways if way.why_not]
    # The columns of the features are kept, and their sums go back; the other layers of 16 -> 16 ->
    # 4 sum their narrower side.
    assert found["mixed"].exchanged_bytes == 4 * 400 // 2 * (12 + 4 * (16 + 4))
    assert found["one rank"].exchanged_bytes == found["replicas of parts"].exchanged_bytes == 0
    assert found["mixed"].gradient_bytes == 8 * sum(
        p.numel() for p in alone(SMALL).build().parameters()
    )
    assert found["halo"].sources > 1
    assert found["replicas of parts"].steps_per_epoch == 20
    layers = found["layers"].layers
    assert layers is not None
    assert layers.stages == ((0, 1), (2,))
    assert choose(measured, Cluster(latency_seconds=1.0)).best.way.name == "one rank"


def test_a_step_that_does_not_fit_is_not_tried(quick, monkeypatch):
    """A graph of this size took the process, and its host, out of memory."""
    monkeypatch.setattr(ways, "memory_bytes", lambda: 0)
    measured = measure_ways(alone(SMALL), 0, CPU, 2)
    assert all("a rank's share of a step would take about" in w.why_not for w in measured.ways)
    with pytest.raises(InputError, match="--ranks 2: no way can be measured here"):
        choose(measured, Cluster())


def test_a_share_holds_less_than_the_whole():
    config = replace(SMALL, width=64, dropout=0.2)
    whole, *shares = (alone(config) for _ in range(2))
    rest = {c.name: c for c in list_ways(whole.config, 4)}
    held: dict[str, int] = {}
    for name in ("one rank", "mixed", "halo"):
        rehearsal = Rehearsal(arrange(shares[0], rest[name], CPU), 0, CPU)
        stretches = rehearsal.timed()
        rehearsal.timed()
        counted = rehearsal.count()
        rehearsal.close()
        held[name] = counted.peak_bytes
        messages = counted.given.total() + counted.summed.total()
        assert (messages == 0) == (name == "one rank")
        assert len(stretches) >= messages + 1  # what is kept travels in the first step only
    assert held["mixed"] < 0.7 * held["one rank"]
    assert held["halo"] < 0.8 * held["one rank"]


def measured_by(rank, world_size, config):
    torch.set_num_threads(1)
    run = on_one_rank(prepare(config, torch.float64), config)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in AS_FEW:
            patch.setattr(module, name, value)
        return measure_ways(run, rank, CPU, 3)


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_what_ranks_are_predicted_to_send_is_what_they_send():
    configs = [replace(c, dropout=0.2, norm="batch") for c in (SAGE, GCN, GAT)]
    predicted = run_each(measured_by, 2, configs)
    for split in ("mixed", "halo"):
        sent = traffic(3, [replace(c, split=split) for c in configs])
        for (measured, _), of_config in zip(predicted, sent, strict=True):
            (way,) = [way for way in measured.ways if way.name == split]
            assert way.exchanged_bytes == sum(of_config.values())


@pytest.mark.multiprocess
def test_ranks_measure_what_messages_take_and_how_they_slow_one_another_down():
    first, other = run_ranks(measured_by, 2, replace(SAGE, layers=2))
    assert first.links == other.links
    assert first.links.num_ranks == 2
    assert len(first.links.exchanges) == len(links.EXCHANGES)
    assert all(seconds > 0 for _, seconds in first.links.sums)
    assert first.links.agreement_seconds > 0
    found = {way.name: way for way in first.ways}
    assert len(found["one rank"].seconds) == 1
    alone, at_once = found["mixed"].seconds
    assert 0 < alone <= at_once
    assert found["mixed"].num_ranks == 3
    assert "3 stages for 2 blocks" in found["layers"].why_not
