"""Pairwise minimization on arrays; knows no model."""
