"""Which pipeline stages: branch and bound over stages, microbatches and schedules."""
