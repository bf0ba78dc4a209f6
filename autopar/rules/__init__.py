"""The rule language: one equation an operator. `strategies/` holds the rules."""
