"""Files of `autopar.checkpoint`: folders that are whole or not there, safetensors, and JSON for everything else."""
