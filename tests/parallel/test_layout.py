"""Which rank is which stage of which replica, and which degrees do not go together."""

import time
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.world import run_ranks
from vigpipe.errors import InputError
from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.layout import Layout, make_groups

many = settings(deadline=None, max_examples=100)


def drawn(layout, cell):
    """One row a replica, one column a stage."""
    rows = [["" for _ in range(layout.pipeline_size)] for _ in range(layout.num_replicas)]
    for rank in range(layout.world_size):
        rows[layout.replica_index(rank)][layout.pipeline_rank(rank)] += cell(rank)
    return [" ".join(row) for row in rows]


def test_ranks_of_two_replicas_of_three_stages():
    assert drawn(Layout(3, 3, 2), str) == ["0 1 2", "3 4 5"]


def test_stages_of_ranks_that_hold_two_each():
    layout = Layout(3, 3, 2, "interleaved1f1b", virtual_stages=2)
    assert drawn(layout, lambda rank: "+".join(map(str, layout.stages_of(rank)))) == [
        "0+3 1+4 2+5",
        "0+3 1+4 2+5",
    ]


@many
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_the_ranks_of_a_replica_hold_every_stage_once(num_stages, num_replicas, virtual_stages):
    layout = Layout(num_stages, num_stages, num_replicas, "loopedbfs", virtual_stages)
    for r in range(num_replicas):
        ranks = [rank for rank in range(layout.world_size) if layout.replica_index(rank) == r]
        stages = [stage for rank in ranks for stage in layout.stages_of(rank)]
        assert sorted(stages) == list(range(num_stages * virtual_stages))
        assert ranks == list(range(r * num_stages, (r + 1) * num_stages))  # neighbours


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
        of_team = {"teammates": own, "summed": own, "between": across, "team": own}
        members = {
            "pipelines": {"pipeline": own, "replicas": across}
            | {"teammates": across, "summed": across},
            "two replicas a team": {"replicas": [0, 1, 2, 3], **of_team},
            "a pipeline a team": {"pipeline": own, "replicas": across, "between": across}
            | {"team": own},
            "shards": {"shards": own, "replicas": across, "teammates": across}
            | {"summed": [0, 1, 2, 3]},
            "shards in teams": {"shards": own, "summed": own, "team": own}
            | {"replicas": across, "between": across},
        }
        for name, layout in OF_FOUR.items():
            replica, position, groups = found[name]
            assert groups == members[name], name
            assert replica == (layout.replica_index(rank) if "replicas" in groups else None)
            assert position == (layout.pipeline_rank(rank) if "pipeline" in groups else None)


def test_ranks_of_two_replicas_of_three_shards():
    layout = Layout(num_replicas=2, num_shards=3)
    assert layout.world_size == 6
    assert [(layout.replica_index(rank), layout.shard_of(rank)) for rank in range(6)] == [
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    ]
    assert {layout.stages_of(rank) for rank in range(6)} == {(0,)}
    assert str(layout) == "2 replicas × 3 shards, 1 micro-batch, gpipe"
    with pytest.raises(InputError, match="8 ranks were started, but --shards 3 x --dp 2 needs 6"):
        layout.check_world(8)


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


# ---- degrees that do not go together --------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("pipeline_size", "--stages"),
        ("num_microbatches", "--microbatches"),
        ("num_replicas", "--dp"),
        ("virtual_stages", "--virtual-stages"),
    ],
)
def test_a_degree_below_one_is_an_error(field, flag):
    for degree in (0, -1):
        options: dict[str, Any] = {field: degree}
        with pytest.raises(InputError, match=f"^{flag} {degree}: must be at least 1$"):
            Layout(**options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_virtual_stages_need_a_schedule_that_runs_them(schedule):
    expected = f"--virtual-stages 2: --schedule {schedule} .* choose --schedule interleaved1f1b or"
    with pytest.raises(InputError, match=expected):
        Layout(2, 2, schedule=schedule, virtual_stages=2)


def test_1f1b_needs_a_micro_batch_a_stage():
    Layout(3, 3, schedule="1f1b")
    with pytest.raises(InputError, match=r"--microbatches 2 < --stages 3; .* --schedule gpipe"):
        Layout(3, 2, schedule="1f1b")
    Layout(3, 2, schedule="gpipe")


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


def test_another_number_of_ranks_is_an_error():
    layout = Layout(3, 3, 2)
    layout.check_world(6)
    for number in (1, 5, 7):
        expected = f"^{number} ranks were started, but --stages 3 x --dp 2 needs 6; start 6 ranks"
        with pytest.raises(InputError, match=expected):
            layout.check_world(number)


def test_a_layout_prints_itself():
    assert str(Layout(2, 5, 3)) == "3 replicas × 2 stages, 5 micro-batches, gpipe"
    assert str(Layout(2, 4, 1, "loopedbfs", 2)) == (
        "1 replica × 2 stages (2 each), 4 micro-batches, loopedbfs"
    )
