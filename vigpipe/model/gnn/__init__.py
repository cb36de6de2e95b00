"""Models of nodes of one large graph, whose edges are given: GCN, GraphSAGE, GAT, GIN, GCNII.

They are staged models. A sample is a node: batches have the shape (b, C), and the edges between
the nodes of a batch are an `ops.adjacency.Adjacency`.
"""
