"""What a step takes whose collectives run beside kernels."""
