"""Graph rewrites, one file a pass, each named after its function."""
