"""Operators that only move elements: importing this package registers their rules."""

from autopar.strategies.view import shapes, shifts, slices

__all__ = ["shapes", "shifts", "slices"]
