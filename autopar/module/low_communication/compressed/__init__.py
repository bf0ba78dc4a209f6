"""Gradients that workers exchange in each step in compressed form: PowerSGD, the largest ones, 1-bit Adam."""
