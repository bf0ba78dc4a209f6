"""What a mask selects (``x[mask]``): graphs compute all rows, and leave the others out where rows meet."""
