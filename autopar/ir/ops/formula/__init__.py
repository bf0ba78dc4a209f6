"""Attention whose weights no kernel computes, and what its formulas look up."""
