"""Generation of tokens on a mesh: transformers' loop, with the graphs of a prompt and of a token."""
