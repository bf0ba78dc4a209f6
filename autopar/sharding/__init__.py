"""What can be sharded and what it takes: factors of dims, candidates of operators, redistributions."""
