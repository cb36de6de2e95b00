"""Show the files of one or several runs as one HTML page that opens from disk."""
