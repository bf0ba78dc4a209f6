"""Capture: a model and a batch become one `Program`, the joint forward and backward graph of ATen operators."""

from autopar.capture.export import Batch, capture
from autopar.capture.harness import Harness, LossFunction

__all__ = ["Batch", "Harness", "LossFunction", "capture"]
