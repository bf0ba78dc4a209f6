"""Search: choose one candidate per node at the least cost, with a certificate."""
