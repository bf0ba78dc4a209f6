"""Parts of `benchmarks/gpu_check.py`: each looks at one thing on one device, and returns rows."""
