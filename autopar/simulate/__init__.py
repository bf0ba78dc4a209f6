"""The event simulator: what a step on many devices takes, from what each task takes and what it waits for."""

from autopar.simulate.engine import simulate
from autopar.simulate.tasks import COMMUNICATION, COMPUTE, WAIT, Task
from autopar.simulate.timeline import Timeline
from autopar.simulate.trace import chrome_trace

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "WAIT",
    "Task",
    "Timeline",
    "chrome_trace",
    "simulate",
]
