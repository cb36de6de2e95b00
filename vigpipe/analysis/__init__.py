"""What the recorded times say: where a step goes, and why ranks wait."""
