"""Tasks of a pipelined step: an order of actions, and what each of them takes and holds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.pipeline.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Order, device_of
from autopar.simulate.tasks import COMMUNICATION, COMPUTE, Task

ACTIVATIONS = "activations"
"""Category of the memory that microbatches hold."""


def pipeline(
    order: Order,
    forward: ArrayLike,
    backward_input: ArrayLike,
    backward_weight: ArrayLike,
    communication: ArrayLike = 0.0,
    *,
    backward: ArrayLike | None = None,
    host: float = 0.0,
    saved: ArrayLike = 0.0,
    saved_for_weight: ArrayLike | None = None,
    before: ArrayLike = 0.0,
    after: ArrayLike = 0.0,
    received: Mapping[Action, Action | None] | None = None,
    occupied: ArrayLike = 0.0,
    alone: float = 1.0,
) -> list[Task]:
    """Tasks of a pipelined step.

    What a stage sends arrives ``communication`` seconds after it was computed, or later where the receiver's stream of
    that direction is still busy with an earlier message. It keeps both devices from computing for ``occupied`` seconds.

    Args:
        order: what each device does, from `autopar.pipeline.schedules.order` or of another schedule.
        forward: seconds of a microbatch in a stage; a number, or one for each stage.
        backward_input: of the part of the backward for the input.
        backward_weight: of the part for the weights.
        communication: seconds between a stage and the next, in both directions; a number, or one for each stage but the
            last. Between stages on one device it is 0.
        backward: of a backward in one piece; default: as long as both parts.
        host: seconds to launch a task.
        saved: bytes that a microbatch's forward leaves on a stage for the backward; a number, or one for each stage.
        saved_for_weight: how many of these the part for the weights still needs; default: all.
        before: seconds that each device works before its first microbatch; a number, or one for each device.
        after: seconds that it works after its last.
        received: after which action of its device the receive for an action begins, see
            `autopar.simulate.p2p_order`; default: as soon as it is sent, whatever the device does.
        occupied: seconds that a message between a stage and the next takes from each of the two devices; a number, or
            one for each stage but the last. Both ends' actions take so much longer.
        alone: how many times as fast a device is while the others do nothing, see `autopar.costs.device.Device`.

    Raises:
        ValueError: there are neither one nor as many numbers as stages, or the order is not one of a whole step.
    """
    devices = device_of(order)
    stages = len(devices)
    durations = _durations(forward, backward_input, backward_weight, backward, stages)
    changes = _changes(saved, saved_for_weight, stages)
    needed = arrivals(order, devices, communication)
    more = _occupied(needed, occupied, stages)
    tasks = _once("before all microbatches", before, len(order), host, alone)
    position = _positions(needed, len(tasks))
    for action, (source, delay) in needed.items():
        device, name = devices[action.stage], str(action)
        sources = () if source is None else (position[source],)
        if delay:
            if received is not None and (earlier := received[action]) is not None:
                sources = (*sources, position[earlier])
            # A stream for each direction: messages keep their order within it, and do not wait for those of the other.
            stream = "receive forward" if action.kind == FORWARD else "receive backward"
            tasks.append(Task(f"receive for {name}", device, stream, delay, sources, COMMUNICATION, host))
            sources = (len(tasks) - 1,)
        seconds, size = float(durations[action.kind][action.stage]), float(changes[action.kind][action.stage])
        tasks.append(_action_task(name, device, seconds + more[action], size, sources, host, alone))
    return tasks + _once("after all microbatches", after, len(order), host, alone)


def _positions(needed: Mapping[Action, tuple[Action | None, float]], count: int) -> dict[Action, int]:
    """The position that the task of each action will have, after ``count`` others."""
    # Before any task is made, since an action may wait for one of a device that comes later in the list.
    position = {}
    for action, (_, delay) in needed.items():
        count += 2 if delay else 1  # one with a delay has a task that receives in front of it
        position[action] = count - 1
    return position


def _occupied(
    needed: Mapping[Action, tuple[Action | None, float]], occupied: ArrayLike, stages: int
) -> Mapping[Action, float]:
    """Seconds that messages add to each action, of what it receives and of what it sends."""
    each = _each("occupied", occupied, stages - 1)
    found = dict.fromkeys(needed, 0.0)
    for action, (source, delay) in needed.items():
        if source is not None and delay:
            for end in (source, action):
                found[end] += float(each[min(source.stage, action.stage)])
    return found


def _action_task(
    name: str, device: int, seconds: float, size: float, sources: tuple[int, ...], host: float, alone: float
) -> Task:
    """The task of an action that adds ``size`` bytes, or frees them if negative."""
    # Memory is allocated when an action begins and freed when it ends: the peak is never underestimated.
    allocated = ((ACTIVATIONS, size),) if size > 0 else ()
    freed = ((ACTIVATIONS, size),) if size < 0 else ()
    return Task(name, device, COMPUTE, seconds, sources, host=host, at_start=allocated, at_end=freed, alone=alone)


def _once(name: str, seconds: ArrayLike, devices: int, host: float, alone: float) -> list[Task]:
    """What each device does once a step."""
    each = _each(name, seconds, devices)
    return [Task(name, device, COMPUTE, float(s), host=host, alone=alone) for device, s in enumerate(each) if s]


def arrivals(order: Order, devices: list[int], communication: ArrayLike) -> dict[Action, tuple[Action | None, float]]:
    """The action that each one waits for on another stage, if any, and the seconds that its message takes.

    In the order of devices and, on a device, of its actions.
    """
    delay = _each("communication", communication, len(devices) - 1)
    actions = [action for row in order for action in row]
    known = set(actions)
    if len(known) < len(actions):
        raise ValueError(f"{next(a for a in actions if actions.count(a) > 1)} is there twice; do each action once")
    needed: dict[Action, tuple[Action | None, float]] = {}
    for action in actions:
        source = _source(action, known, len(devices))
        remote = source is not None and devices[source.stage] != devices[action.stage]
        seconds = float(delay[min(source.stage, action.stage)]) if source is not None and remote else 0.0
        needed[action] = (source, seconds)
    return needed


def _source(action: Action, known: set[Action], stages: int) -> Action | None:
    """The action whose result an action takes; the backward of the last stage takes that of its own forward."""
    stage, kind, microbatch = action
    if kind == FORWARD:
        sources = [Action(stage - 1, FORWARD, microbatch)] if stage else []
    elif kind == BACKWARD_WEIGHT:
        sources = [Action(stage, BACKWARD_INPUT, microbatch)]
    elif stage == stages - 1:
        sources = [Action(stage, FORWARD, microbatch)]
    else:
        # The part for the input is all that the stage before waits for, where the schedule splits the backward.
        sources = [Action(stage + 1, whole_or_part, microbatch) for whole_or_part in (BACKWARD, BACKWARD_INPUT)]
    if not sources:
        return None
    for source in sources:
        if source in known:
            return source
    raise ValueError(f"{action} needs {' or '.join(map(str, sources))}, which no device does; add it to the order")


def _durations(
    forward: ArrayLike,
    backward_input: ArrayLike,
    backward_weight: ArrayLike,
    backward: ArrayLike | None,
    stages: int,
) -> Mapping[str, NDArray[np.float64]]:
    """Seconds of each kind of action on each stage."""
    for_input = _each("backward_input", backward_input, stages)
    for_weight = _each("backward_weight", backward_weight, stages)
    return {
        FORWARD: _each("forward", forward, stages),
        BACKWARD: for_input + for_weight if backward is None else _each("backward", backward, stages),
        BACKWARD_INPUT: for_input,
        BACKWARD_WEIGHT: for_weight,
    }


def _changes(saved: ArrayLike, saved_for_weight: ArrayLike | None, stages: int) -> Mapping[str, NDArray[np.float64]]:
    """Bytes that each kind of action adds on each stage."""
    whole = _each("saved", saved, stages)
    for_weight = whole if saved_for_weight is None else _each("saved_for_weight", saved_for_weight, stages)
    return {FORWARD: whole, BACKWARD: -whole, BACKWARD_INPUT: for_weight - whole, BACKWARD_WEIGHT: -for_weight}


def _each(name: str, value: ArrayLike, count: int) -> NDArray[np.float64]:
    numbers = np.asarray(value, dtype=np.float64)
    if numbers.ndim and numbers.shape != (count,):
        raise ValueError(f"{name} has shape {numbers.shape}; give one number, or {count} in a row")
    return np.broadcast_to(numbers, (count,))
