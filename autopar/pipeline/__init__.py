"""Pipelines: which stage computes what, the graphs of a stage, and the order in which it runs them."""
