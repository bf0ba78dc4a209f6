"""Measure the devices and links at hand, and fit the figures that the cost model wants: `autopar calibrate`."""

from autopar.costs.calibrate.collectives import measure_collectives
from autopar.costs.calibrate.fit import fit_device, fit_link, predicted_seconds
from autopar.costs.calibrate.kernels import measure_kernels
from autopar.costs.calibrate.run import Settings, calibrate, cluster_of, measure, measure_over_processes
from autopar.costs.calibrate.sample import Sample

__all__ = [
    "Sample",
    "Settings",
    "calibrate",
    "cluster_of",
    "fit_device",
    "fit_link",
    "measure",
    "measure_collectives",
    "measure_kernels",
    "measure_over_processes",
    "predicted_seconds",
]
