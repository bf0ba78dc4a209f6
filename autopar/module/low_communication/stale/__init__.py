"""Asynchronous SGD with bounded staleness: owners of parts of the parameters take gradients as they come."""
