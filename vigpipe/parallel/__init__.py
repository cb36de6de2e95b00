"""Ranks, mesh, plan, split, schedule, replication: everything that knows there is more than one process."""
