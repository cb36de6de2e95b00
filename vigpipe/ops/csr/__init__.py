"""The kernels of `ops.sparse`, without autograd: plain torch, C++ and Triton.

Each module has the same functions. They take contiguous float32 or float64 tensors; of the graph,
an `Adjacency` with m targets, n sources and e edges. H is the number of heads, C of channels, c of
channels of a head.
"""
