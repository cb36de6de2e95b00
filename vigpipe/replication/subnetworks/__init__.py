"""Independent sub-networks (GIST): each replica trains some of the channels of a wide model.

Wolfe, Yang, Artun, Kyrillidis et al. 2021, "GIST: Distributed Training for Large-Scale Graph
Convolutional Networks", arXiv:2102.10424.
"""
