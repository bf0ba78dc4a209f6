"""What the search reads off the graph that a plan gives: what a device holds, and how long a step takes."""
