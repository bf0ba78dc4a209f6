"""Passes about kernels: what they ask of their arguments, and which of them there need not be."""
