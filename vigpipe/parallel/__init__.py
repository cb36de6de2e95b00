"""Train one model on several ranks: layout, plan, split, schedule, gradient sums, agreement."""
