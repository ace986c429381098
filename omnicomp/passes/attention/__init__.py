"""Hand-written attention read by its meaning: what the scores are, as a function of batch, head, query and key."""
