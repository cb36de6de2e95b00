"""Prepared folders: a graph cut into parts, in files that are mapped into memory.

manifest.json                the manifest, with the SHA-256 of every file
nodes.safetensors            degrees, classes and split of all nodes
edges/00000.safetensors      the edges that end in the nodes of the first part
features/00000.safetensors   the features of these nodes
names.json                   the names of all nodes, if they have some

The nodes are numbered anew, those of the first part first, and within a part in their old order.
"""
