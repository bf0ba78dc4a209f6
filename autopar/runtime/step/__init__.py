"""The three kinds of step: whole batch, microbatches, pipeline."""
