"""How the replicas of a run agree: a file for each strategy, and what several of them use.

The training loop asks a strategy what this rank does next, and tells it what came of a step
(`strategy.Strategy`). It does not know which strategy it has.
"""
