"""Bytes a rank needs: its weights and what belongs to them, what it keeps, what it works with.

    weights × (1 + optimizer_bytes)    with gradients and optimizer state
  + activations                        kept of every micro-batch that went forward and not yet back
  + working set                        an estimate: the piece with the largest backward holds about
                                       as much again as it kept, and the gradient of its output

What a rank holds before it has a model (Profile.base_bytes) comes on top.
"""

import math
from collections.abc import Mapping, Sequence

from vigpipe.planning.profile import Piece, Profile
from vigpipe.schedules import Action


def weight_bytes(profile: Profile, piece: Piece) -> int:
    """Of a piece's weights, gradients and optimizer state."""
    return math.ceil(piece.parameter_bytes * (1 + profile.optimizer_bytes))


def kept_bytes(profile: Profile, piece: Piece, microbatch_size: int) -> int:
    """Of a piece's activations between forward and backward of one micro-batch."""
    return math.ceil(profile.at(piece.activation_bytes, microbatch_size))


def working_bytes(profile: Profile, piece: Piece, microbatch_size: int) -> int:
    """Of what a piece's backward needs beside that."""
    return kept_bytes(profile, piece, microbatch_size) + math.ceil(
        profile.at(piece.boundary_bytes, microbatch_size)
    )


def peak(own: Sequence[Action], kept: Mapping[int, int]) -> int:
    """The most that micro-batches in flight hold together.

    Args:
        own: a rank's actions in their order.
        kept: of one micro-batch, by stage of the rank; all 1: their number.
    """
    held = most = 0
    for kind, stage, _ in own:
        if kind == "forward":
            held += kept[stage]
            most = max(most, held)
        else:
            held -= kept[stage]
    return most


def rank_bytes(
    profile: Profile,
    own: Sequence[Action],
    pieces: Mapping[int, Sequence[Piece]],
    microbatch_size: int,
) -> int:
    """Bytes of one rank in a training step, without Profile.base_bytes.

    Args:
        profile: costs of the pieces.
        own: the rank's actions in their order.
        pieces: of each of its stages, by number of the stage.
        microbatch_size: samples of the largest micro-batch.
    """
    every = [piece for stage in pieces.values() for piece in stage]
    kept = {
        number: sum(kept_bytes(profile, piece, microbatch_size) for piece in stage)
        for number, stage in pieces.items()
    }
    return (
        sum(weight_bytes(profile, piece) for piece in every)
        + peak(own, kept)
        + max(working_bytes(profile, piece, microbatch_size) for piece in every)
    )
