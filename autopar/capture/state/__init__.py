"""The Python state of a model: what a call reads and writes besides its tensors."""
