"""Predict the memory of a rank: weights, kept activations and the working set of a backward.

    weights
  + trained weights × optimizer_bytes  gradients and optimizer state
  + activations                        kept of every micro-batch between its forward and backward
  + working set                        an estimate: the piece with the largest backward holds about
                                       as much again as it kept, and the gradient of its output

What a rank holds before it has a model (Profile.base_bytes) is added to this.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from vigpipe.planning.profile import Piece, Profile, Size
from vigpipe.schedules.rule import Action


def weight_bytes(profile: Profile, piece: Piece) -> int:
    """Compute the bytes of a piece's weights, gradients and optimizer state."""
    return math.ceil(piece.parameter_bytes + piece.num_trained_bytes * profile.optimizer_bytes)


def kept_bytes(profile: Profile, piece: Piece, microbatch_size: Size) -> int:
    """Compute the bytes of activations that a piece keeps from forward to backward."""
    return math.ceil(profile.at(piece.activation_bytes, microbatch_size))


def working_bytes(profile: Profile, piece: Piece, microbatch_size: Size) -> int:
    """Estimate the bytes that a piece's backward needs beside its kept activations."""
    gradient_bytes = math.ceil(profile.boundary_bytes(piece, microbatch_size))
    return kept_bytes(profile, piece, microbatch_size) + gradient_bytes


def peak(actions: Sequence[Action], kept: Mapping[int, int]) -> int:
    """Compute the most that micro-batches in flight hold, each of which keeps `kept`, by stage."""
    changes = (kept[stage] if kind == "forward" else -kept[stage] for kind, stage, _ in actions)
    return max(accumulate(changes, initial=0))


def rank_bytes(
    profile: Profile,
    actions: Sequence[Action],
    pieces: Mapping[int, Sequence[Piece]],
    microbatch_size: Size,
) -> int:
    """Compute the peak bytes of one rank, given its pieces by stage, without Profile.base_bytes."""
    all_pieces = [piece for stage in pieces.values() for piece in stage]
    kept = {
        number: sum(kept_bytes(profile, piece, microbatch_size) for piece in stage)
        for number, stage in pieces.items()
    }
    return (
        sum(weight_bytes(profile, piece) for piece in all_pieces)
        + peak(actions, kept)
        + max(working_bytes(profile, piece, microbatch_size) for piece in all_pieces)
    )
