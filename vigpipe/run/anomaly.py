"""Find the block in which numbers stop being finite, for a step that was not applied."""

import re
from itertools import chain

from vigpipe.model.graph import collected_anomalies
from vigpipe.parallel.agreement import all_gather_values
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.run.rank import RankState


def find_anomaly(rank_state: RankState, batch: ReplicaBatch) -> str:
    """Repeat a step, on all ranks; say in which block features first stop being finite."""
    for model in rank_state.trained.models:
        model.set_detect_anomaly(True)
    rank_state.reducer.gradients.clear()
    with collected_anomalies() as own_messages:
        rank_state.pipeline.train_step(batch, eager=True)
    rank_state.trained.statistics.take()
    for model in rank_state.trained.models:
        model.set_detect_anomaly(rank_state.run.config.detect_anomaly)
    by_rank = all_gather_values(own_messages[:1], *rank_state.strategy.peers)
    first_messages = list(chain.from_iterable(by_rank))
    if not first_messages:
        return "the features of all blocks are finite, so look at the readout and the gradients"
    return min(first_messages, key=lambda message: int(re.findall("[0-9]+", message)[0]))
