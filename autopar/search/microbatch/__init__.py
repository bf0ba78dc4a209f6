"""The program of one microbatch, and how many microbatches a step has."""
