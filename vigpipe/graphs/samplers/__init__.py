"""Which sub-graphs of one graph an epoch consists of; a micro-batch is one of them.

sampler.py     what every sampler does
whole.py       full: the graph itself
parts.py       parts: the parts of a partition, several of them joined
make.py        make the sampler that the options name
"""
