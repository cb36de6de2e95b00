"""From a command to ranks: how they start, identify themselves, meet, and end together."""
