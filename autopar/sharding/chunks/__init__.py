"""Products that run beside the collectives of their rows: where they are, and what chunks of them cost."""
