"""Numbers in few bits: blocks of them, which messages of a plan are sent so, and a graph's operators for that."""
