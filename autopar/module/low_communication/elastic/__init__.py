"""Workers that train apart, each a world of its own, that leave and join between rounds while the others go on."""
