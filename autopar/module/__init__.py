"""The module that the user trains, and the session behind it."""
