"""The command `vigpipe check`: compare a layout with unsplit models in one process.

Replicas that take every step together are compared with one model: both see the same D x M
micro-batches in the same order and begin with the same weights. The loss and every gradient are
compared after every step, every weight and BatchNorm's running statistics at the end. For replicas
that take steps of their own see `commands.check_replicas`.
"""

from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from vigpipe.commands.check_replicas import (
    InTurn,
    compare_replicas,
    gathered,
    is_exact,
    kinds_of_state,
)
from vigpipe.commands.check_server import compare_with_server
from vigpipe.commands.check_subnetworks import SubnetworksInTurn
from vigpipe.commands.differences import Compared, Kinds, differences, table_of
from vigpipe.errors import DIFFERS, DONE
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import complete_step, train_step


def check(run: Run, rank: int, device: torch.device, folder: Path, num_steps: int = 3) -> int:
    """Compare the layout with unsplit models, as one rank; every rank returns the same code.

    The rank with the last stage of replica 0 runs the reference too, and writes check.txt.
    """
    if run.layout.has_server:
        compared = compare_with_server(run, rank, device, num_steps)
    elif run.config.strategy != "synchronous":
        in_turn = SubnetworksInTurn if run.has_subnetworks else InTurn
        compared = compare_replicas(run, rank, device, num_steps, in_turn)
    else:
        compared = compare_steps(run, rank, device, num_steps)
    failed = torch.zeros(1, device=device)
    if compared is not None:
        wanted = "1e-10" if run.dtype == torch.float64 else "1e-5 relative"
        wanted = "bit for bit" if compared.exact else wanted
        is_equal = all(
            row.identical or (not compared.exact and row.within(run.dtype)) for row in compared.rows
        )
        config = run.config
        norm = "no" if config.norm == "none" else config.norm
        text = (
            f"{config.model} on {run.job.name}, {run.layout}, {config.dtype}, {norm} norm"
            f"\n{compared.against}; wanted: {wanted}\n\n{table_of(compared.rows)}\n"
        )
        text += "\nequal\n" if is_equal else "\nDIFFERENT\n"
        Console(soft_wrap=True, highlight=False).print(text, end="")
        (folder / "check.txt").write_text(text, encoding="utf-8")
        failed.fill_(not is_equal)
    if run.layout.world_size > 1:
        torch.distributed.all_reduce(failed)
    return DIFFERS if failed.item() else DONE


def compare_steps(run: Run, rank: int, device: torch.device, num_steps: int) -> Compared | None:
    """Compare steps that all replicas take together; None except on the rank that writes."""
    rank_state = make_rank_state(run, rank, device)
    of_layout = trace(rank_state, num_steps)
    rank_state.feed.close()
    if of_layout is None:
        return None
    unsplit = make_rank_state(run.unsplit(), 0, device)
    reference = trace(unsplit, num_steps)
    unsplit.feed.close()
    assert reference is not None
    layout = run.layout
    count = layout.num_replicas * layout.num_microbatches
    against = (
        f"against the unsplit model in one process on the same {count} micro-batches, "
        f"{num_steps} steps of {run.job.describe_step(run.layout)}"
    )
    return Compared(differences(of_layout, reference), against, is_exact(run, device))


def trace(rank_state: RankState, num_steps: int) -> Kinds | None:
    """Record losses and gradients of every step, and the last state; None but on the writer."""
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in islice(batches(rank_state), num_steps):
        step = train_step(rank_state, batch)
        complete_step(rank_state)
        of_stage = {
            n: p.grad for n, p in rank_state.trained.parameters().items() if p.grad is not None
        }
        of_step = gathered(rank_state, of_stage)
        if of_step is not None and step.loss is not None:
            losses.append(step.loss)
            gradients |= {f"{name} (step {len(losses)})": g for name, g in of_step.items()}
    state = gathered(rank_state, rank_state.trained.state())
    if state is None or not rank_state.is_writer:
        return None
    return {
        "loss": {"loss": torch.tensor(losses, dtype=torch.float64)},
        "gradients": gradients,
        **kinds_of_state(rank_state, state),
    }
