"""Sequences that eager mode packs, so that nothing is computed of their padding: padded in a trace, under masks."""
