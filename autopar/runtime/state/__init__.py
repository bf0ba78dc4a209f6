"""Parameters, buffers and optimizer state on a mesh."""
