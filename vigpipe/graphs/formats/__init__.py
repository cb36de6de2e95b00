"""The files that graphs come in, one format each; none of them is ever executed.

Each reader gives the parts of a graph to `checked.make_graph`, which refuses what no run could
train on with an InputError of one sentence.
"""
