"""How random operators draw: each rank its shard, or all ranks the whole tensor."""
