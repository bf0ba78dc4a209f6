"""Compiled steps: parts of the local graphs between collectives are compiled, one for blocks that are alike."""
