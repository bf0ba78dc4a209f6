"""Settings of the whole suite: one intra-op thread, and the two hypothesis profiles."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# The same examples on every run, so that a failure is never a matter of luck.
SLOW_MACHINES = (HealthCheck.too_slow,)
settings.register_profile("default", derandomize=True, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.load_profile("default")
