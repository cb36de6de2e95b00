"""Find where numbers cease to be finite in a step that no rank has taken part in."""

import re

from vigpipe.data.batches import ReplicaBatch
from vigpipe.model.graph import collected_anomalies
from vigpipe.parallel.agreement import all_gather_values
from vigpipe.run.rank import RankState


def find_anomaly(rank_state: RankState, batch: ReplicaBatch) -> str:
    """Run a step's forwards and backwards once more, and say where numbers cease to be finite.

    Args:
        rank_state: this rank's state; every rank calls this, and only gradients change.
        batch: this replica's share of the step's batch.

    Returns:
        The same sentence on every rank: the first block that made a number which is not finite.
    """
    for model in rank_state.models:
        model.set_detect_anomaly(True)
    rank_state.replicas.gradients.clear()
    with collected_anomalies() as found:
        rank_state.pipeline.train_step(batch)
    rank_state.statistics.take(rank_state.run.layout.num_microbatches)
    for model in rank_state.models:
        model.set_detect_anomaly(rank_state.run.config.detect_anomaly)
    first = [
        message
        for messages in all_gather_values(found[:1], rank_state.run.layout.world_size)
        for message in messages
    ]
    if not first:
        return "the features of all blocks are finite, so look at the readout and the gradients"
    return min(first, key=lambda message: int(re.findall("[0-9]+", message)[0]))
