"""Operators on a dim that is padded first, as one: what is padded would have another length."""
