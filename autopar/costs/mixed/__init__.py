"""Clusters of several kinds of devices: their groups, and figures that stand for several devices together."""
