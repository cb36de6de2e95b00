"""Rows on their way to the writer of the run's files, also when another one takes over."""

import torch.distributed as dist

from vigpipe.replication.parcels import Inbox, Outbox


def test_a_writer_that_takes_over_reads_what_was_not_noted_once_more():
    store = dist.HashStore()
    first, second = Outbox(store, 0), Outbox(store, 3)
    writer = Inbox(store, [0, 3])
    assert list(writer.take()) == []
    first.send({"n": 1})
    second.send({"n": 2})
    first.send({"n": 3})
    assert list(writer.take()) == [{"n": 1}, {"n": 3}, {"n": 2}]
    writer.note(num_bytes=10)
    second.send({"n": 4})
    assert list(writer.take()) == [{"n": 4}]  # and the writer dies
    heir = Inbox(store, [0, 3])
    assert heir.noted == {"num_bytes": 10}
    first.send({"n": 5})
    assert list(heir.take()) == [{"n": 5}, {"n": 4}]
    heir.note(num_bytes=20)
    assert list(Inbox(store, [0, 3]).take()) == []


def test_what_was_noted_is_forgotten():
    """A store keeps everything in memory, or in a file."""
    store = dist.HashStore()
    outbox, writer = Outbox(store, 0), Inbox(store, [0])
    for number in range(5):
        outbox.send({"n": number})
    list(writer.take())
    writer.note()
    assert store.num_keys() == 1  # what was noted last
