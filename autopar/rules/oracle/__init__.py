"""Oracles: they prove a rule by running it on shards."""
