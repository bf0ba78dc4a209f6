"""The values that every stage passes on: `Program` (the joint graph), `TensorType` and `Layout`, `Plan`."""
