"""Pieces that are not trained (--freeze): they keep every bit, and nothing travels back to them."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from tests.refusals import check_refusals
from tests.world import run_each
from vigpipe.config.freeze import parse_freeze
from vigpipe.config.options import TrainConfig
from vigpipe.model.norm import BatchNorm
from vigpipe.parallel.stage import Stage
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.header import header
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import train_step

CONFIG = TrainConfig(
    data="fake",
    image_size=8,
    batch_size=8,
    steps=2,
    microbatches=4,
    drop_path=0.2,
    clip=1.0,
    freeze="stem,0-1",
)


def trained(rank: int, world_size: int, config: TrainConfig) -> dict[str, Any]:
    """Take the steps of a run, and tell all about them."""
    torch.set_num_threads(1)
    run = prepare(config, torch.float32)
    state = make_rank_state(run, rank, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in state.trained.state().items()}
    sent_back: Counter[int] = Counter()
    send = Stage.get_bwd_send_ops

    def counted(self: Stage, bwd_chunk_id: int) -> list:
        operations = send(self, bwd_chunk_id)
        sent_back[self.stage_index] += sum(operation.tensor.nbytes for operation in operations)
        return operations

    Stage.get_bwd_send_ops = counted
    try:
        for batch in islice(batches(state), run.num_steps):
            train_step(state, batch)
    finally:
        Stage.get_bwd_send_ops = send
    now = state.trained.state()
    kept = state.trained.optimizer.state
    parameters = {n: p for model in state.trained.models for n, p in model.named_parameters()}
    return {
        "weights": {name: tensor.clone() for name, tensor in now.items()},
        "changed": {name for name in now if not torch.equal(now[name], before[name])},
        "with gradient": {name for name, p in parameters.items() if p.grad is not None},
        "with state": {name for name, p in parameters.items() if p in kept},
        "sent back": dict(sent_back),
    }


def piece_of(name: str) -> str:
    first, second = (*name.split("."), "")[:2]
    return {"backbone": second, "prediction": "readout"}.get(first, "stem")


@pytest.mark.multiprocess
@pytest.mark.parametrize("freeze", ["stem,0-1", "1,3", "0,readout"])
def test_frozen_pieces_keep_every_bit_with_any_number_of_stages(freeze):
    config = replace(CONFIG, freeze=freeze)
    reference = trained(0, 1, config)
    frozen = parse_freeze(freeze, 4, ("stem", "readout"))
    own = {name for name in reference["weights"] if piece_of(name) not in frozen}
    for what in ("changed", "with gradient", "with state"):
        assert {*map(piece_of, reference[what])} == {*map(piece_of, own)}, what
    for stages in (2, 4):
        (by_rank,) = run_each(trained, stages, [replace(config, stages=stages)])
        weights = {name: tensor for found in by_rank for name, tensor in found["weights"].items()}
        assert weights.keys() == reference["weights"].keys()
        for name, tensor in reference["weights"].items():
            assert torch.equal(weights[name], tensor), name
        back = {stage: n for found in by_rank for stage, n in found["sent back"].items()}
        # The stage after a frozen stem and frozen first blocks, and those before, send none back.
        silent = range(1 + (2 if freeze == "stem,0-1" else 0) * stages // 4)
        assert {stage for stage in range(stages) if back[stage] == 0} == {*silent}


def test_norms_of_frozen_pieces_evaluate_and_masks_of_others_are_drawn_as_before():
    model: Any = prepare(CONFIG, torch.float32).build().train()
    norms = {name: m for name, m in model.named_modules() if isinstance(m, BatchNorm)}
    assert {piece_of(name) for name, m in norms.items() if not m.training} == {"stem", "0", "1"}
    assert not model.pos_embed.requires_grad
    model(torch.rand(3, 3, 8, 8), torch.arange(3)).sum().backward()
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None}
    assert {piece_of(name) for name in with_gradient} == {"2", "3", "readout"}


def test_a_run_says_how_many_parameters_are_trained(tmp_path):
    run = prepare(replace(CONFIG, freeze="stem,0-3"), torch.float32)
    readout = sum(p.numel() for p in run.build().get_submodule("prediction").parameters())
    _, course, *_ = header(run, torch.device("cpu"), tmp_path)
    assert f" parameters, {readout:,} of them trained" in course


def test_what_cannot_be_frozen_is_refused():
    rows = [
        ("stem,4", "--freeze stem,4: has '4', expected stem, readout or blocks from 0 to 3"),
        ("2-1", "has '2-1'"),
        ("", "has ''"),
        ("body", "has 'body'"),
        ("stem,0-3,readout", "leaves nothing to train"),
    ]
    check_refusals(rows, lambda text: prepare(replace(CONFIG, freeze=text), torch.float32))
    divided = replace(CONFIG, freeze="0", strategy="subnetworks", dp=2)
    check_refusals([(divided, "leave one of the two out")], lambda c: prepare(c, torch.float32))
    gcn = TrainConfig(model="gcn", data="sbm:60,3", freeze="stem")
    row = (gcn, "has 'stem', expected blocks from 0 to 1")
    check_refusals([row], lambda config: prepare(config, torch.float32))
