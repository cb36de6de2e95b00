"""A process that does not know the secret of a run is noticed in any place of a rank."""

from typing import Any

import pytest
import torch.distributed as dist

from tests.world import run_each
from vigpipe import proof
from vigpipe.errors import StrangerError
from vigpipe.launch.signed_store import SignedStore
from vigpipe.parallel.layout import Layout, make_groups
from vigpipe.proof import mac, prove, prove_group, signed, use_secret, verified
from vigpipe.replication.store import _port_of


@pytest.fixture(autouse=True)
def _secret():
    use_secret(b"the secret")
    yield
    use_secret(None)


def meet(rank, world_size, stranger):
    """Prove again as all ranks, of which one has guessed; return who is a stranger to this one."""
    assert proof._secret is not None  # ranks of one host have one from where they have met
    if rank == stranger:
        use_secret(b"guessed")
    try:
        prove_group()
        make_groups(Layout(num_replicas=4), 60)
    except StrangerError as error:
        return str(error)
    return ""


@pytest.mark.multiprocess
def test_every_rank_notices_one_that_does_not_know_the_secret():
    nobody, of_2 = run_each(meet, 4, [None, 2])
    assert nobody == [""] * 4
    for rank, said in enumerate(of_2):
        assert f"has the place of rank {2 if rank != 2 else 0};" in said


def with_parrot(words):
    """Return what exchanges blocks with a rank 1 that sends this one's own words back to it."""

    def exchange(own):
        words.append(own.numpy().tobytes())
        return own.view(2, -1).flip(0).flatten()

    return exchange


def test_what_a_rank_has_said_itself_proves_nothing_and_no_number_comes_twice():
    words = []
    for _ in range(2):
        with pytest.raises(StrangerError, match="the place of rank 1"):
            prove(with_parrot(words), 0, [0, 1])
    assert len(set(words)) == 4


def test_without_a_secret_nothing_is_exchanged():
    use_secret(None)
    prove(lambda own: pytest.fail("exchanged"), 0, [0, 1])
    assert (signed("key", "text"), verified("key", b"text")) == (b"text", b"text")


def test_no_two_lists_of_parts_have_one_mac():
    assert len({mac(b"s", *parts) for parts in (["ab"], ["a", "b"], ["", "ab"], ["ab", ""])}) == 4


def test_what_a_stranger_writes_into_the_store_is_noticed():
    raw: Any = dist.HashStore()
    ours = dist.PrefixStore("run", SignedStore(dist.PrefixStore("all", raw)))
    ours.set("here", "ä")
    assert ours.get("here").decode() == "ä"
    assert ours.compare_set("table", "", "1") == b"1"
    assert ours.compare_set("table", "1", "2") == b"2"
    assert ours.compare_set("table", "1", "3") == b"2"
    for of_stranger in (b"", b"1", bytes(32) + b"1", raw.get("all/run/table")):
        raw.set("all/run/here", of_stranger)
        with pytest.raises(StrangerError, match="has written run/here where the ranks meet"):
            ours.get("here")
    raw.set("all/run/table", "9")
    with pytest.raises(StrangerError):
        ours.compare_set("table", "2", "3")
    assert ours.add("number", 2) == 2
    assert ours.check(["here", "number"])
    assert ours.delete_key("here")
    assert not ours.check(["here"])
    assert _port_of(ours) is None
