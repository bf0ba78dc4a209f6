"""Coverage: how many of torch's own operator samples autopar can split, and whether their rules are true."""
