"""Prepared folders: a graph cut into parts, in files that are mapped into memory.

manifest.py  what is in a folder, with the SHA-256 of every file
write.py     make a folder of a graph and its parts
files.py     map the files, each of which is checked when it is first needed
read.py      open a folder as a graph whose edges and features stay in the files
graph.py     that graph

manifest.json                the manifest
nodes.safetensors            degrees, classes and split of all nodes
edges/00000.safetensors      the edges that end in the nodes of the first part
features/00000.safetensors   the features of these nodes
names.json                   the names of all nodes, if they have some

The nodes are numbered anew, those of the first part first, and within a part in their old order.
"""
