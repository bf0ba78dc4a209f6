"""Passes for pipeline stages."""
