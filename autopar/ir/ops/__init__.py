"""Our own operators in graphs: collectives by mesh axis, draws, accumulation, host copies."""
