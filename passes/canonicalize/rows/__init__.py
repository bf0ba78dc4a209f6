"""Rows that are cut, padded, shifted, read by windows or by indices, in forms of which rules know how they split."""
