"""Functions of torch that a trace takes otherwise than eager mode runs them."""
