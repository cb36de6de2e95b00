"""Cut the nodes of one graph into parts, and take the sub-graph of a part.

partition.py   which node is in which part, and how many edges are kept
make.py        make a partition by one of four methods, without empty parts; random parts too
metis.py       metis: few edges between parts of equal size
spectral.py    spectral: clusters of eigenvectors, for small graphs
walks.py       walks: clusters of an embedding of random walks
neighbours.py  the neighbours of every node, which all methods but the random one need
clusters.py    k-means, for spectral and walks
cached.py      keep partitions in files between runs
generations.py other parts every few epochs
balance.py     move nodes from slow parts to fast ones
induced.py     the sub-graph on some nodes
"""
