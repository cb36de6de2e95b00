"""Which sub-graphs of one graph an epoch consists of; a micro-batch is one of them."""
