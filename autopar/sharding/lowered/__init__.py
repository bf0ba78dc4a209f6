"""Operators in whose place other code is emitted: that code, and what it costs."""
