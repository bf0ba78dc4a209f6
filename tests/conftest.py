"""Settings of the whole suite: one intra-op thread, and the two hypothesis profiles."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples on every run, so that a failure is never a matter of luck.
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.load_profile("default")
