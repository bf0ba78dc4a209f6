"""Trainers of other libraries, with models that `autopar.parallelize` returned. Nothing here is imported by autopar."""
