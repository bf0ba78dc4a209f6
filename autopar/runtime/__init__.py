"""The runtime: rewritten graphs on real ranks."""
