"""What functions of checkpoints take."""

from __future__ import annotations

import torch

from autopar.costs.arguments import Kind, a, optional
from autopar.module.parallel_module import ParallelModule

PARALLEL: Kind = a(ParallelModule, "what parallelize() returned")
OF_PARALLEL: Kind = optional(a(torch.optim.Optimizer, "a torch.optim.Optimizer of the model's parameters"))
