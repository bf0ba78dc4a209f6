"""How a call's arguments and a model's outputs map to the flat inputs and outputs of a graph."""
