"""From a command to ranks: who they are, how they start and meet, how they end together."""
