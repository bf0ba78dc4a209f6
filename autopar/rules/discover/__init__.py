"""Discovery: a rule for an operator that has none, found by running it on small tensors."""
