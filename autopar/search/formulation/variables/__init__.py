"""The variables of the layout problem, by what they decide on."""
