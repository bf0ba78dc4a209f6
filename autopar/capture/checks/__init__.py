"""Checks of values that are made after a step: those of torch's functions, and those that the user's code makes."""
