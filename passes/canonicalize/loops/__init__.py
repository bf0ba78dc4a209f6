"""Loops of a model, of which a graph has the rounds one after the other."""
