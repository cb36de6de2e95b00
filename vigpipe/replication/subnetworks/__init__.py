"""Independent sub-networks (GIST): each replica trains some of the channels of a wide model.

Wolfe, Yang, Artun, Kyrillidis et al. 2021, "GIST: Distributed Training for Large-Scale Graph
Convolutional Networks", arXiv:2102.10424.

    draws.py      which replica trains which channels in a round
    rows.py       what each rank stores of the wide model, and the slices that travel
    strategy.py   the strategy: rounds of own steps
"""
