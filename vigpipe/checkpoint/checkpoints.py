"""Save the checkpoints of a run from one rank's training loop."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vigpipe.checkpoint.best import Best, best_in, better
from vigpipe.checkpoint.manifest import Manifest, list_checkpoints, read_manifest
from vigpipe.checkpoint.rescue import rescue
from vigpipe.checkpoint.saver import Saver, rank_file_name
from vigpipe.checkpoint.state import named_tensors, replica_prefix, residuals, share_of
from vigpipe.config.files import as_toml
from vigpipe.job.score import Scores
from vigpipe.parallel.agreement import run_with_heartbeats
from vigpipe.parallel.values import all_gather_values, broadcast_value
from vigpipe.replication.own_steps import LeftOver
from vigpipe.run.provenance import provenance
from vigpipe.run.rank import RankState


class Checkpoints:
    """Saves one rank's share of the checkpoints of a run; all ranks construct this together."""

    def __init__(
        self,
        rank_state: RankState,
        folder: Path,
        log: Callable[[str], None],
        resumed: Manifest | None = None,
    ) -> None:
        layout = rank_state.run.layout
        self.rank_state = rank_state
        # Not first in the middle of training: of pictures it looks at every file.
        self._fingerprint = rank_state.run.fingerprint
        # A server has all there is; otherwise every rank has a share.
        replicas = [layout.writer] if layout.has_server else range(layout.num_replicas)
        self._replica_of = {
            rank_file_name(pipeline_rank, replica_index * layout.num_shards + shard): replica_index
            for replica_index in replicas
            for shard in range(layout.num_shards)
            for pipeline_rank in range(layout.pipeline_size)
        }
        # The best evaluation so far; None without --keep-best.
        self.best = None if resumed is None else best_in(resumed, folder)
        self.saver = Saver(
            folder,
            list(self._replica_of),
            rank_file_name(rank_state.mesh.pipeline_rank, self._copy),
            is_writer=rank_state.is_writer,
            keep=rank_state.run.config.keep,
            token=broadcast_value(secrets.token_hex(4), layout.world_size),
            log=log,
            is_lost=self._is_lost,
        )

    def _is_lost(self, file: str) -> bool:
        """Whether the replica was lost that would write a file of a checkpoint."""
        own_steps = self.rank_state.own_steps
        team, _ = self.rank_state.run.layout.team_of(self._replica_of[file])
        return own_steps is not None and team in own_steps.membership.lost()

    @property
    def _copy(self) -> int:
        """Which copy of its stages this rank has: one that shares a batch has all of them."""
        shards = self.rank_state.mesh.shards
        return self.rank_state.mesh.replica_index * shards.size + shards.rank

    def take_over(self) -> None:
        """Complete the checkpoints from now on, on the rank that writes the run's files."""
        self.saver.is_writer = True
        for checkpoint in list_checkpoints(self.saver.folder)[:1]:
            self.best = best_in(read_manifest(checkpoint), checkpoint)

    def is_best(self, scores: Scores) -> bool:
        """Whether an evaluation is the best so far; the ranks that have evaluated all call this."""
        by, peers = self.rank_state.run.config.keep_best, self.rank_state.strategy.peers
        if by is None:
            return False
        knows = scores.test is not None
        new = better(scores, self.rank_state.step, by, self.best) if knows else None
        tables = all_gather_values(new and new.as_table(), *peers)
        table = next(filter(None, tables), None)
        if table is not None:
            self.best = Best(**table)
        return table is not None

    def save(
        self, loss: float | None, evaluated: bool, metrics_bytes: int = 0, events_bytes: int = 0
    ) -> None:
        """Copy this rank's share of the state, and write it while training goes on; all ranks do.

        Peers wait for a rank that still writes its file of the previous checkpoint. The sizes of
        metrics.jsonl and events.jsonl are known on the rank that writes them.
        """
        rank_state, own_steps = self.rank_state, self.rank_state.own_steps
        layout = rank_state.run.layout
        run_with_heartbeats(self.saver.finish, *rank_state.strategy.peers)
        num_copies = layout.team_size * layout.num_shards  # They share the writing of one state.
        own = share_of(named_tensors(rank_state), self._copy % num_copies, num_copies)
        prefix = replica_prefix(layout.state_of(rank_state.mesh.replica_index))
        share = {f"{prefix}{name}": tensor for name, tensor in own.items()}
        share |= residuals(rank_state)
        replicas, stored = {}, {}
        if own_steps is not None:
            sizes = {"metrics_bytes": metrics_bytes, "events_bytes": events_bytes}
            replicas = {"progress": own_steps.progress(), **sizes}
            stored = {f"{prefix}rows/{name}": t for name, t in own_steps.stored().items()}
        manifest = replace(self._manifest(loss, evaluated), replicas=replicas)
        self.saver.save(manifest, share, stored)

    def rescue(
        self, loss: float | None, evaluated: bool, left_over: LeftOver | None = None
    ) -> bool:
        """Save all of this rank's stages after a peer was lost, if it has a file; say if it did."""
        saver, rank_state = self.saver, self.rank_state
        if saver.own_file not in self._replica_of:
            return False
        manifest, state = self._manifest(loss, evaluated), named_tensors(rank_state)
        rows = None
        if left_over is not None:
            saver.give_up()
            number = rank_state.run.layout.state_of(rank_state.mesh.replica_index)
            state = {f"{replica_prefix(number)}{name}": tensor for name, tensor in state.items()}
            replicas = {"progress": left_over.seen, "metrics_bytes": 0, "events_bytes": 0}
            manifest = replace(manifest, step=left_over.step, replicas=replicas)
            rows = left_over.parcels
        return rescue(saver.folder, saver.token, saver.own_file, manifest, state, rows)

    def _manifest(self, loss: float | None, evaluated: bool) -> Manifest:
        run, layout = self.rank_state.run, self.rank_state.run.layout
        return Manifest(
            step=self.rank_state.step,
            num_steps=run.num_steps,
            evaluated=evaluated,
            loss=loss,
            config=as_toml(run.config),
            data={**self._fingerprint, **self.rank_state.feed.progress()},
            layout={
                "text": str(layout),
                "stages": [list(blocks) for blocks in run.plan.stages],
                "num_stages": layout.pipeline_size,
                "pieces": layout.num_microbatches * layout.num_replicas,
            },
            weights=run.weights_metadata(),
            versions=provenance(),
            best={} if self.best is None else self.best.as_table(),
        )
