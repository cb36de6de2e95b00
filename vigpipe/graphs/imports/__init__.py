"""Turn the tables, files and objects that people have into the arrays of a graph file."""
