"""One graph on several ranks: who has which nodes and channels, and how layers get the others."""
