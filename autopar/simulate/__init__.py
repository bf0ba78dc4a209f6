"""The event simulator: what a step on many devices takes, from what each task takes and what it waits for."""

from autopar.pipeline.schedules import SCHEDULES, Action, Order, order
from autopar.simulate.engine import simulate
from autopar.simulate.pipeline_tasks import pipeline
from autopar.simulate.tasks import COMMUNICATION, COMPUTE, Task
from autopar.simulate.timeline import Timeline
from autopar.simulate.trace import chrome_trace

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "SCHEDULES",
    "Action",
    "Order",
    "Task",
    "Timeline",
    "chrome_trace",
    "order",
    "pipeline",
    "simulate",
]
