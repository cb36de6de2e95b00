"""Which sub-graphs of one graph an epoch consists of; a micro-batch is one of them.

sampler.py     what every sampler does
whole.py       full: the graph itself
parts.py       parts: the parts of a partition, several of them joined
saint.py       saint-node, saint-edge, saint-walk: nodes at random, with all edges between them
counts.py      how often these come, counted beforehand and kept in a file
layered.py     batches of training nodes, with edges of their own for every layer:
neighbour.py   neighbour: some neighbours of every node
fastgcn.py     fastgcn: some nodes that stand for all neighbours
aggregation.py the weights of edges in the whole graph, which some of these go by
draws.py       random numbers
make.py        make the sampler that the options name
"""
