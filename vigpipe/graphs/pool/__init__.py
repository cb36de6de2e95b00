"""Sums over edges on threads of their own, while the rank's threads multiply (`--sparse-threads`).

A layer sums what edges bring and multiplies by weights, in one order or the other. Both are cut
into chunks of nodes: the pool sums one chunk while the rank multiplies another (MixGCN's pipeline
between two kinds of processors).
"""
