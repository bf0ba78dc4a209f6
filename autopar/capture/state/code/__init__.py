"""What the model's code reads besides the model: names in scopes, and what these refer to."""
