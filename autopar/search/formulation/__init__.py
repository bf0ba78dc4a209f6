"""The optimization problem of one program: variables, costs, constraints."""
