"""Pairwise cost minimization with a memory limit at every program point: each node takes memory for an interval."""
