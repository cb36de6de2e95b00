"""Collect what summary.json says about a run."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vigpipe.job.rows import trained_on
from vigpipe.job.score import Scores
from vigpipe.launch.device import hardware, peak_bytes
from vigpipe.parallel.values import all_gather_values
from vigpipe.replication.metrics import summarize_replicas
from vigpipe.replication.scaling import predict
from vigpipe.run.provenance import provenance
from vigpipe.run.rank import RankState


def summarize(
    rank_state: RankState,
    scores: Scores,
    loss: float | None,
    started: float,
    accounts: Sequence[Sequence[dict[str, Any]]] | None = None,
    compression: Mapping[str, Any] | None = None,
    sent: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Describe a finished run and its results, on the rank that writes the run's files.

    `started` is on `time.perf_counter`; `accounts`, of `gather_accounts`, None if all did the same.
    """
    run, layout = rank_state.run, rank_state.run.layout
    replicas: dict[str, Any] = {}
    if accounts is not None:
        table = summarize_replicas(accounts, has_server=layout.has_server)
        prediction = predict(
            table["each"],
            table.get("server"),
            averages_all=run.config.strategy == "periodic",
            samples=trained_on(run.job.unit),
        )
        is_divided = run.has_subnetworks  # more of them would train other models
        scaling = {} if prediction is None or is_divided else {"scaling": prediction.as_table()}
        replicas["replicas"] = table | scaling
    if rank_state.own_scores:
        replicas["subnetworks"] = rank_state.own_scores
    if compression is not None:
        replicas["compression"] = dict(compression)
    if sent is not None:
        number = layout.num_shards
        replicas["shards"] = {"number": number, "split": run.config.split, "sent_bytes": dict(sent)}
    return {
        "model": run.config.model,
        "data": run.job.name,
        "loss": loss,
        **scores.as_summary(),
        "steps": rank_state.step,
        **run.job.summary(),
        "layout": {
            "stages": [list(blocks) for blocks in run.plan.stages],
            "ranks": layout.world_size,
            "microbatches": layout.num_microbatches,
            "replicas": layout.num_replicas,
            "schedule": layout.schedule,
        },
        "threads_per_rank": torch.get_num_threads(),
        "hardware": hardware(rank_state.device),
        "peak_bytes": peak_bytes(rank_state.device),
        **replicas,
        "wall_seconds": time.perf_counter() - started,
        **provenance(),
    }


def gather_compression(rank_state: RankState) -> dict[str, Any] | None:
    """Gather how many bytes replica 0 has sent for the sums of every step; all ranks call this."""
    compressor, layout = rank_state.reducer.compressor, rank_state.run.layout
    if compressor is None:
        return None
    by_rank = all_gather_values(compressor.account(), layout.world_size)[: layout.pipeline_size]
    sent, of_ring = (sum(a[name] for a in by_rank) for name in ("bytes_sent", "bytes_of_ring"))
    return {
        "method": rank_state.run.config.compress,
        "sums": by_rank[0]["sums"],
        "bytes_sent": sent,
        "bytes_of_ring": of_ring,
        "ratio": sent / of_ring if of_ring else None,
    }


def gather_sent(rank_state: RankState) -> dict[str, int] | None:
    """Add up the bytes that a replica's ranks have sent one another, by purpose; all call this."""
    shards = rank_state.mesh.shards
    if shards.size == 1:
        return None
    by_rank = all_gather_values(dict(shards.sent), shards.size, shards.group)
    return {what: sum(sent.get(what, 0) for sent in by_rank) for what in sorted(by_rank[0])}


def gather_accounts(
    rank_state: RankState,
    own: Mapping[str, Any],
    all_gather: Callable[[Any], dict[int, Any]] | None = None,
) -> list[list[dict[str, Any]]]:
    """Gather what all ranks have counted, by team, a server last; `all_gather` asks those left."""
    layout = rank_state.run.layout
    own = {**own, "peak_bytes": peak_bytes(rank_state.device)}
    if all_gather is None:
        by_rank = dict(enumerate(all_gather_values(own, layout.world_size)))
    else:
        by_rank = all_gather(own)
    teams = map(layout.ranks_of_team, range(layout.num_teams + layout.has_server))
    return [[by_rank[rank] for rank in ranks if rank in by_rank] for ranks in teams]
