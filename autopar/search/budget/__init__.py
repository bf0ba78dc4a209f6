"""The memory-constrained search: constraints tightened until the rewritten graph fits."""
