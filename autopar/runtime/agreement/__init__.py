"""Ranks agree on what they do next, and hear of each other's failures."""
