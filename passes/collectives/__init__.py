"""Passes that join collectives and put them beside kernels."""
