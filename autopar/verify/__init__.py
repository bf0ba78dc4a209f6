"""Is the rewritten graph equal to the model? All ranks in one process, in float64."""
