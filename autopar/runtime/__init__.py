"""The runtime: rewritten graphs on real ranks, behind a module that looks like the original."""
