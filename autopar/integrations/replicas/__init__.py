"""Replica groups: copies of a parallel model that average gradients, and of which each may be lost and come back.

Nothing here needs a library beside torch: `autopar.integrations.torchft` has the manager that groups meet by.
"""
