"""Workers that train apart and exchange parameters now and then: local SGD, DiLoCo, streaming DiLoCo."""
