"""One large graph: where it comes from, how it is cut into sub-graphs, and who trains on which."""
