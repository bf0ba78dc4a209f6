"""One call of a parallel module: the rows of a rank, what is checked first, and the Python state around it."""
