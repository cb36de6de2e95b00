"""What replicas with steps of their own have told, in the files of the run."""

import json
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from tests.full_disk import files_of_at_most
from vigpipe.errors import InputError
from vigpipe.replication.parcels import Inbox, Outbox
from vigpipe.run.events import EventsFile
from vigpipe.run.others import Others


def test_events_that_find_no_room_at_the_end_are_told_and_not_forgotten(tmp_path):
    event = {"replica": 0, "item": 3}
    store = dist.HashStore()
    events = EventsFile(tmp_path, {"replicas": 2})
    membership = Mock(lost=dict, inbox=lambda: Inbox(store, [0]))
    others = Others(Mock(own_steps=Mock(membership=membership)))
    others.begin(Mock(), lambda inbox: events)
    Outbox(store, 0).send({"events": [event], "metrics": []})
    with files_of_at_most(40), pytest.raises(InputError, match=r"events\.jsonl: cannot be writ"):
        others.finish()
    others.finish()
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert rows == [{"start": {"replicas": 2}}, event]
