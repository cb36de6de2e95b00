"""Which rank is which stage of which replica, and which degrees do not go together."""

import time
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.world import run_ranks
from vigpipe.errors import InputError
from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.layout import Layout, make_groups


def place_of(layout):
    """Of this rank, its place in its replicas' group and in its pipeline, and all members."""
    groups = make_groups(layout, 5.0)
    of_replica, of_pipeline = (
        None if group is None else group.rank() for group in (groups.replicas, groups.pipeline)
    )
    return of_replica, of_pipeline, members_of(groups)


def members_of(groups):
    named = [(name, group) for name, group in groups._asdict().items() if name != "links"]
    links = [(f"link to {other}", group) for other, group in groups.links.items()]
    return {n: dist.get_process_group_ranks(g) for n, g in [*named, *links] if g is not None}


def linked_members(rank, world_size):
    """A server and two workers of two stages each; and three replicas without a server."""
    served, gossiping = Layout(2, 2, 2, num_teams=2, has_server=True), Layout(1, 1, 6, num_teams=3)
    return [members_of(make_groups(layout, 5.0, linked=True)) for layout in (served, gossiping)]


def test_ranks_hold_every_third_stage_or_one_share_of_a_batch():
    layout = Layout(3, 3, 2, "interleaved1f1b", virtual_stages=2)
    assert [layout.stages_of(rank) for rank in range(6)] == [(0, 3), (1, 4), (2, 5)] * 2
    assert str(layout) == "2 replicas × 3 stages (2 each), 3 micro-batches, interleaved1f1b"
    layout = Layout(num_replicas=2, num_shards=3)
    assert [layout.shard_of(rank) for rank in range(6)] == [0, 1, 2] * 2
    assert str(layout) == "2 replicas × 3 shards, 1 micro-batch, gpipe"
    with pytest.raises(InputError, match="8 ranks were started, but --shards 3 x --dp 2 needs 6"):
        layout.check_world(8)


@pytest.mark.multiprocess
def test_every_two_replicas_have_a_link_or_each_worker_and_the_server():
    for rank, (served, gossiping) in enumerate(run_ranks(linked_members, 6)):
        stage, replica = rank % 2, rank // 2
        others = [2] if replica < 2 else [0, 1]
        links = {f"link to {o}": sorted((2 * o + stage, rank)) for o in others}
        assert {n: g for n, g in served.items() if n.startswith("link")} == links
        links = {f"link to {o}": sorted((2 * o + stage, rank)) for o in {0, 1, 2} - {replica}}
        assert {n: g for n, g in gossiping.items() if n.startswith("link")} == links


OF_FOUR = {
    "pipelines": Layout(2, 2, 2),
    "two replicas a team": Layout(1, 1, 4, num_teams=2),
    "a pipeline a team": Layout(2, 2, 2, num_teams=2),
    "shards": Layout(num_replicas=2, num_shards=2),
    "shards in teams": Layout(1, 1, 2, num_teams=2, num_shards=2),
}


def places_of(rank, world_size):
    return {name: place_of(layout) for name, layout in OF_FOUR.items()}


@pytest.mark.multiprocess
def test_the_groups_agree_with_the_layout():
    """A team adds up by itself and meets the others place by place; shards add up with all."""
    for rank, found in enumerate(run_ranks(places_of, 4)):
        own, across = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        of_team = {"teammates": own, "summed": own, "across_teams": across, "team": own}
        members = {
            "pipelines": {"pipeline": own, "replicas": across}
            | {"teammates": across, "summed": across},
            "two replicas a team": {"replicas": [0, 1, 2, 3], **of_team},
            "a pipeline a team": {"pipeline": own, "replicas": across, "across_teams": across}
            | {"team": own},
            "shards": {"shards": own, "replicas": across, "teammates": across}
            | {"summed": [0, 1, 2, 3]},
            "shards in teams": {"shards": own, "summed": own, "team": own}
            | {"replicas": across, "across_teams": across},
        }
        for name, layout in OF_FOUR.items():
            replica, position, groups = found[name]
            assert groups == members[name], name
            assert replica == (layout.replica_index(rank) if "replicas" in groups else None)
            assert position == (layout.pipeline_rank(rank) if "pipeline" in groups else None)


def wait_for_nobody(rank, world_size):
    groups = make_groups(Layout(2, 2, 2), 0.5)
    if rank == 3:
        dist.distributed_c10d._get_default_store().wait(["0", "1", "2"])  # silent, but alive
        return None
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:  # a peer that is silent, or one that has given up
        dist.all_reduce(torch.zeros(1), group=groups.replicas if rank == 1 else groups.pipeline)
    assert is_lost_peer(caught.value)
    seconds = time.monotonic() - began
    dist.distributed_c10d._get_default_store().set(str(rank), "has given up")
    return seconds


@pytest.mark.multiprocess
def test_the_groups_give_up_at_the_timeout_and_not_at_torch_s_own():
    seconds = run_ranks(wait_for_nobody, 4)
    assert max(s for s in seconds if s is not None) < 20  # and torch waits for the world's minute


def test_interleaved_takes_what_torch_takes():
    """The condition of torch's ScheduleInterleaved1F1B."""
    for num_stages, num_microbatches in product(range(1, 6), range(1, 16)):
        rounds = max(1, num_microbatches // num_stages)
        if num_microbatches % rounds == 0:
            Layout(num_stages, num_microbatches, 1, "interleaved1f1b", 2)
            continue
        expected = f"not a multiple of {rounds}; choose --microb"
        with pytest.raises(InputError, match=expected) as caught:
            Layout(num_stages, num_microbatches, 1, "interleaved1f1b", 2)
        *_, one, _, other = str(caught.value).split()
        assert int(one) < num_microbatches < int(other)
        for better in (one, other):
            Layout(num_stages, int(better), 1, "interleaved1f1b", 2)
