"""Explain the page's words where they stand, each in one short line."""

from vigpipe.report.markup import escape

TERMS = {
    # A run and its layout.
    "step": "one update of the weights, from one batch",
    "epoch": "one pass over the training images",
    "epoch of a graph": "one pass over its sub-graphs, or over the whole graph",
    "rank": "one process of the run; it holds one stage or several",
    "stage": "consecutive blocks of the model that run as a unit",
    "replica": "one whole copy of the model: a full row of stages",
    "micro-batch": "the slice of a replica's share of a batch that a stage works on at once",
    "schedule": "the order in which a stage takes its forward and backward passes",
    # Scores.
    "top-1": "the share of images whose most likely class is the right one",
    "top-5": "the share of images whose right class is among the five most likely",
    "accuracy": "the share of nodes whose most likely class is the right one; of several classes, "
    "of all answers",
    "micro-F1": "2 × right / (said + true), over all pairs of a node and a class",
    "macro-F1": "the mean of each class's own F1, so that rare classes count as much as others",
    "validation image": "held out of the training images, to choose weights by (--validation)",
    "validation node": "a node that the graph keeps out of training, to choose weights by",
    "moving average": "of the weights over the steps, evaluated like the weights (--ema)",
    # The bubble and its reasons.
    "bubble": "the share of a step in which a rank waits for others",
    "measured": "the bubble as it was: waiting for input and gradients, and sending",
    "formula": "(S − 1) / (V M + S − 1), for S ranks of a pipeline with V equal stages each and M "
    "micro-batches",
    "fill and drain": "the bubble of equal stages that take the mean of the measured times",
    "imbalance": "what is added because some stages take longer than others",
    "variation": "what is added because some micro-batches take longer than others",
    "transfer": "the rest: transfers, and the schedule's own work",
    # Where the time of a rank goes.
    "compute": "forward and backward passes",
    "forward": "a micro-batch passes through a stage; with the loss, on the last stage",
    "backward": "the gradients of a micro-batch pass back through a stage",
    "wait input": "waiting for the stage before",
    "wait gradient": "waiting for the stage behind",
    "wait end": "waiting for the slowest rank to finish its backward passes",
    "send": "sending features and gradients, as far as the rank waits for it",
    "all-reduce": "adding up the gradients of all replicas",
    "optimizer": "the update of the weights",
    "other": "statistics of norms, clipping, moving averages, and what lies between",
    "unaccounted": "what none of the others covers",
    "between steps": "from the end of a step to the beginning of the next one",
    # Replicas with steps of their own.
    "item": "one replica's share of a step, which may be any replica's",
    "worked": "on its items, from reading their samples to the update of the weights",
    "waited": "for others: to be averaged with them, or to rest with them for a checkpoint",
    "averaged": "exchanging and averaging weights or gradients, as far as the replica waits for it",
    "staleness": "updates of the weights from when a replica took them to when its gradient came",
    "CV": "standard deviation over the mean; 0 if all are equal",
    "imbalance of loads": "the largest over the mean; 1 if all are equal",
    "efficiency": "the mean over the largest; the rest to 1 is idle where all wait for the largest",
    # Parts of the model.
    "stem": "turns an image into nodes",
    "block": "a Grapher and an FFN",
    "Grapher": "finds the graph of the nodes, and mixes every node with its neighbours",
    "kNN": "the search for the nearest neighbours of every node",
    "aggregation": "the reduction of a node's neighbours to one feature",
    "block of a graph model": "one layer: every node is made anew of what its edges bring",
    "update": "linear maps, norm and activation of what the edges of a node brought",
    "FFN": "the same small network for every node",
    "readout": "turns the nodes into one number per class",
    # Statistics.
    "std": "standard deviation",
    "p95": "95 % of the values are smaller",
    "count": "number of values: one per step and, of parts of blocks, one per block too",
}


def explain(*names: str) -> str:
    """Make a list that explains some of TERMS."""
    items = "".join(f"<li><dfn>{name}</dfn>: {escape(TERMS[name])}</li>\n" for name in names)
    return f'<ul class="terms">\n{items}</ul>'
