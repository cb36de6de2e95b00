"""What a user may say: the options, where they come from, and what they mean under a recipe."""
