"""What runs have left, as one HTML page that opens from disk."""
