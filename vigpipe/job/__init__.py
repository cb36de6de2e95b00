"""The seam between the trainer and what it trains on: images (`data`), or one graph (`graphs`)."""
