"""What a device holds over a step: which activations are saved, recomputed or offloaded; liveness and peak."""
