"""Ranks, mesh, plan, split, schedule, replication: what knows of more than one process."""
