"""Cut the nodes of one graph into parts, and take the sub-graph of a part."""
