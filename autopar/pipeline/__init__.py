"""Pipelines: which stage computes what, the pieces that a stage runs, and the order in which it runs them."""
