"""Sasha Rush's LLM Training Puzzles as schedules of the event simulator, in the time and memory of his targets.

https://github.com/srush/LLM-Training-Puzzles (commit 644127e): descriptions and targets of `Distributed.py`, durations
and sizes of `lib.py`. The schedules here are our own.

    python -m benchmarks.puzzles
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from autopar.simulate import COMMUNICATION, COMPUTE, Task, Timeline, simulate

HIDDEN, LENGTH = 512, 256
WEIGHT, ACTIVATION = HIDDEN * HIDDEN, HIDDEN * LENGTH
"""Of a layer's weights, optimizer state or gradients; and of a batch between two layers."""

UPDATE, COLLECTIVE, PASS = 0.5, 0.3, 0.2
"""Steps of an update, a collective and a message; a batch takes one step in a layer, forward or backward."""


@dataclass(frozen=True)
class Name:
    """What a device holds.

    Attributes:
        kind: ``activation``, ``slope`` (its gradient), ``weight`` (all of it), ``shard``, ``gradient`` or ``sum`` (over
            all batches).
        layer: whose, or before which; a model's last activation is before layer ``layers``.
        batches: of an activation or its gradient.
    """

    kind: str
    layer: int
    batches: tuple[int, ...] = ()


@dataclass
class Machine:
    """Devices, what they hold, and the tasks so far; every call appends a task or refuses what a device cannot do.

    Attributes:
        layers: of the model.
        batches: of a step.
        devices: how many.
        tasks: in program order.
    """

    layers: int
    batches: int
    devices: int = 1
    tasks: list[Task] = field(default_factory=list)
    _made: dict[tuple[int, Name], int] = field(default_factory=dict)
    _size: dict[tuple[int, Name], float] = field(default_factory=dict)
    _seen: dict[tuple[int, Name], set[int]] = field(default_factory=dict)
    _uses: dict[tuple[int, Name], list[int]] = field(default_factory=dict)
    _freed: list[tuple[int, list[int]]] = field(default_factory=list)
    _updated: dict[int, float] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)

    def load(self, device: int, layers: Collection[int], parts: int = 1) -> None:
        """A device has weights and optimizer state of these layers, or its one of so many shards of each."""
        kind = "weight" if parts == 1 else "shard"
        made = {Name(kind, layer): WEIGHT / parts for layer in layers} | {
            Name("state", layer): WEIGHT / parts for layer in layers
        }
        self._add("load", device, "compute", 0.0, (), made, ())

    def batch(self, device: int, batches: Sequence[int]) -> None:
        """A device has the input of these batches."""
        name = Name("activation", 0, tuple(batches))
        self._add("input", device, "compute", 0.0, (), {name: len(batches) * ACTIVATION}, ())

    def forward(self, device: int, layer: int, batches: Sequence[int], keep: Sequence[Name] = ()) -> None:
        """A layer computes its output; what is in ``keep`` is freed with it."""
        found, whole = tuple(batches), Name("weight", layer)
        reads = (whole, Name("activation", layer, found))
        made = {Name("activation", layer + 1, found): float(len(found) * ACTIVATION)}
        self._add(f"F{layer} {_text(found)}", device, "compute", len(found), reads, made, keep)

    def split(self, device: int, layer: int, batches: Sequence[int]) -> None:
        """An activation becomes one for each batch, in the same memory."""
        whole = Name("activation", layer, tuple(batches))
        made = {Name("activation", layer, (b,)): float(ACTIVATION) for b in batches}
        self._add("split", device, "compute", 0.0, (whole,), made, (whole,))

    def join(self, device: int, layer: int, batches: Sequence[int], kind: str) -> None:
        """Activations, or their gradients, of single batches become one, in the same memory."""
        parts = tuple(Name(kind, layer, (b,)) for b in batches)
        made = {Name(kind, layer, tuple(batches)): float(len(parts) * ACTIVATION)}
        self._add("join", device, "compute", 0.0, parts, made, parts)

    def loss(self, device: int, batches: Sequence[int]) -> None:
        """The last activation becomes its gradient."""
        last = Name("activation", self.layers, tuple(batches))
        made = {Name("slope", self.layers, tuple(batches)): float(len(batches) * ACTIVATION)}
        self._add("loss", device, "compute", 0.0, (last,), made, (last,))

    def backward(self, device: int, layer: int, batches: Sequence[int], frees: Sequence[Name] = ()) -> None:
        """A layer's gradients of weights, added to those that there are, and of its input; what it read is freed."""
        found = tuple(batches)
        own, slope = Name("activation", layer, found), Name("slope", layer + 1, found)
        gradient = Name("gradient", layer)
        made = {Name("slope", layer, found): float(len(found) * ACTIVATION)} if layer else {}
        if (device, gradient) not in self._made:
            made[gradient] = float(WEIGHT)
        seen = self._seen.setdefault((device, gradient), set())
        if seen & set(found):
            raise ValueError(f"batches {sorted(seen & set(found))} are twice in the gradient of layer {layer}")
        seen.update(found)
        reads = (Name("weight", layer), own, slope, *([gradient] if gradient not in made else []))
        index = self._add(f"B{layer} {_text(found)}", device, "compute", len(found), reads, made, (own, slope, *frees))
        self._made[device, gradient] = index

    def gather(
        self, layer: int, devices: Sequence[int], wait: bool = True, users: Collection[int] | None = None
    ) -> None:
        """All have the whole weights, which those that are no users drop at once.

        Args:
            layer: whose weights.
            devices: that have a shard each.
            wait: not before what each device computes until here.
            users: of the devices; None: all.
        """
        whole = Name("weight", layer)
        group = len(self.tasks)
        for device in devices:
            after = (self._last[device],) if wait and device in self._last else ()
            made = {whole: float(WEIGHT)}
            self._add(
                f"gather {layer}", device, "collectives", COLLECTIVE, (Name("shard", layer),), made, (), group, after
            )
            if users is not None and device not in users:
                self._add("drop", device, "collectives", 0.0, (whole,), {}, (whole,))

    def reduce(self, layer: int, devices: Sequence[int], scatter: bool = False) -> None:
        """Each device has the sum of the gradients, or of its own shard; devices without one have zeros."""
        group, own, total = len(self.tasks), Name("gradient", layer), Name("sum", layer)
        seen = [self._seen.pop((device, own), set()) for device in devices]
        together = set().union(*seen)
        if sum(map(len, seen)) != len(together):
            raise ValueError(f"the gradient of layer {layer} has a batch on two devices")
        for device in devices:
            has = (own,) if (device, own) in self._made else ()
            made = {total: WEIGHT / len(devices) if scatter else float(WEIGHT)}
            self._add(f"reduce {layer}", device, "collectives", COLLECTIVE, has, made, has, group)
            self._seen[device, total] = set(together)

    def update(self, device: int, layer: int) -> None:
        """The step of the optimizer, which takes gradients of all batches and frees them."""
        name = next((n for n in (Name("sum", layer), Name("gradient", layer)) if (device, n) in self._made), None)
        if name is None or self._seen[device, name] != set(range(self.batches)):
            raise ValueError(f"device {device} does not have the gradients of all batches of layer {layer}")
        held = next(n for n in (Name("shard", layer), Name("weight", layer)) if (device, n) in self._made)
        self._updated[layer] = self._updated.get(layer, 0.0) + self._size[device, held] / WEIGHT
        self._add(f"U{layer}", device, "compute", UPDATE, (held, Name("state", layer), name), {}, (name,))

    def send(self, source: int, target: int, name: Name, keep: bool = False) -> None:
        """A device passes what it holds to another, and does not keep it unless told to."""
        group, size = len(self.tasks), self._size[source, name]
        self._add(f"send to {target}", source, f"to {target}", PASS, (name,), {}, () if keep else (name,), group)
        self._add(f"receive from {source}", target, f"from {source}", PASS, (), {name: size}, (), group)

    def run(self) -> Timeline:
        """The timeline of all tasks.

        Raises:
            ValueError: something is freed while it is used, or weights are not updated, or more than once.
        """
        timeline = simulate(self.tasks)
        for index, uses in self._freed:
            if any(timeline.end[use] > timeline.end[index] for use in uses):
                raise ValueError(f"{self.tasks[index]} frees what a later task uses")
        # Each of several replicas updates all of its weights.
        whole = {layer: share for layer, share in self._updated.items() if share < 1 or share % 1}
        if whole or len(self._updated) < self.layers:
            raise ValueError(f"these parts of the layers' weights were updated: {self._updated}")
        return timeline

    def _add(
        self,
        what: str,
        device: int,
        stream: str,
        seconds: float,
        reads: Sequence[Name],
        makes: dict[Name, float],
        frees: Sequence[Name],
        group: int | None = None,
        after: tuple[int, ...] = (),
    ) -> int:
        index = len(self.tasks)
        for name in reads:
            if (device, name) not in self._made:
                raise ValueError(f"device {device} has no {name} for {what}")
            self._uses.setdefault((device, name), []).append(index)
        changes: dict[str, float] = {}
        for name, size in makes.items():
            if (device, name) in self._made:
                raise ValueError(f"device {device} already has {name}")
            changes[name.kind] = changes.get(name.kind, 0.0) + size
        waits = (*after, *(self._made[device, name] for name in reads))
        for name in frees:
            changes[name.kind] = changes.get(name.kind, 0.0) - self._size.pop((device, name))
            self._freed.append((index, self._uses.pop((device, name), [])))
            del self._made[device, name]
            self._seen.pop((device, name), None)
        for name, size in makes.items():
            self._made[device, name], self._size[device, name] = index, size
        if stream == "compute":
            self._last[device] = index
        kind = COMPUTE if stream == "compute" else COMMUNICATION
        at_end = tuple((kind, size) for kind, size in changes.items() if size)
        self.tasks.append(
            Task(what, device, stream, seconds, tuple(sorted(set(waits))), kind, group=group, at_end=at_end)
        )
        return index


def _text(batches: Sequence[int]) -> str:
    return ",".join(map(str, batches))


def standard() -> Machine:
    """All batches through the first layer, then one after the other through the last, forward and backward."""
    machine, everything = Machine(2, 4), range(4)
    machine.load(0, range(2))
    machine.batch(0, everything)
    machine.forward(0, 0, everything)
    machine.split(0, 1, everything)
    for b in everything:
        machine.forward(0, 1, [b])
        machine.loss(0, [b])
        machine.backward(0, 1, [b])
    machine.join(0, 1, everything, "slope")
    machine.backward(0, 0, everything)
    for layer in range(2):
        machine.update(0, layer)
    return machine


def accumulation() -> Machine:
    """One batch after the other; gradients add up."""
    machine = Machine(2, 4)
    machine.load(0, range(2))
    for b in range(4):
        machine.batch(0, [b])
        _forward_and_loss(machine, 0, b)
        for layer in (1, 0):
            machine.backward(0, layer, [b])
    for layer in range(2):
        machine.update(0, layer)
    return machine


def _forward_and_loss(machine: Machine, device: int, batch: int) -> None:
    for layer in range(machine.layers):
        machine.forward(device, layer, [batch])
    machine.loss(device, [batch])


def data_parallel() -> Machine:
    """A batch on each device; a layer's gradients are reduced while the layer before it is computed."""
    machine, devices = Machine(2, 4, 4), range(4)
    for device in devices:
        machine.load(device, range(2))
        machine.batch(device, [device])
        _forward_and_loss(machine, device, device)
    for layer in (1, 0):
        for device in devices:
            machine.backward(device, layer, [device])
        machine.reduce(layer, devices)
    for layer in (1, 0):
        for device in devices:
            machine.update(device, layer)
    return machine


def sharded(scatter: bool) -> Machine:
    """Weights are gathered a layer ahead, and gradients reduced and used a layer behind, beside what is computed."""
    machine, devices, last = Machine(6, 4, 4), range(4), 5
    for device in devices:
        machine.load(device, range(6), 4)
        machine.batch(device, [device])
    machine.gather(0, devices)
    for layer in range(6):
        if layer < last:
            machine.gather(layer + 1, devices)
        for device in devices:
            # The last layer's weights stay: its backward pass is next.
            machine.forward(device, layer, [device], [Name("weight", layer)] if layer < last else [])
    for device in devices:
        machine.loss(device, [device])
    for layer in range(last, -1, -1):
        if layer < last:
            machine.reduce(layer + 1, devices, scatter)
        if layer:
            machine.gather(layer - 1, devices)
        for device in devices:
            machine.backward(device, layer, [device], [Name("weight", layer)])
            if layer < last:
                machine.update(device, layer + 1)
    machine.reduce(0, devices, scatter)
    for device in devices:
        machine.update(device, 0)
    return machine


def pipeline(parts: Sequence[Sequence[int]]) -> Machine:
    """Two layers on each device; each part of the batches goes forward through all devices, then backward."""
    machine, devices = Machine(8, 4, 4), range(4)
    for device in devices:
        machine.load(device, _layers(device))
    for part in parts:
        machine.batch(0, part)
        for device in devices:
            for layer in _layers(device):
                machine.forward(device, layer, part)
            if device < 3:
                machine.send(device, device + 1, Name("activation", _layers(device)[1] + 1, tuple(part)))
        machine.loss(3, part)
    for part in parts:
        for device in reversed(devices):
            for layer in reversed(_layers(device)):
                machine.backward(device, layer, part)
            if device:
                machine.send(device, device - 1, Name("slope", _layers(device)[0], tuple(part)))
    for device in devices:
        for layer in reversed(_layers(device)):
            machine.update(device, layer)
    return machine


def _layers(device: int) -> tuple[int, int]:
    return 2 * device, 2 * device + 1


def sharded_pipelines() -> Machine:
    """Four pipelines, each with a batch; a layer's weights are in 16 shards, gathered just ahead of its use."""
    machine, devices = Machine(4, 4, 16), range(16)
    for device in devices:
        machine.load(device, range(4), 16)
        if device % 4 == 0:
            machine.batch(device, [device // 4])
    for layer in range(4):
        users = [device for device in devices if device % 4 == layer]
        machine.gather(layer, devices, users=users)
        for device in users:
            machine.forward(device, layer, [device // 4], [Name("weight", layer)] if layer < 3 else [])
            if layer < 3:
                machine.send(device, device + 1, Name("activation", layer + 1, (device // 4,)))
            else:
                machine.loss(device, [device // 4])
    for layer in (3, 2, 1, 0):
        users = [device for device in devices if device % 4 == layer]
        if layer < 3:
            machine.gather(layer, devices, users=users)
        for device in users:
            machine.backward(device, layer, [device // 4], [Name("weight", layer)])
            if layer:
                machine.send(device, device - 1, Name("slope", layer, (device // 4,)))
        machine.reduce(layer, devices, scatter=True)
    for layer in (3, 2, 1, 0):
        for device in devices:
            machine.update(device, layer)
    return machine


@dataclass(frozen=True)
class Puzzle:
    """A puzzle, its author's targets and our schedule.

    Attributes:
        name: in the notebook.
        time: target, in steps.
        memory: target, in numbers on a device.
        schedule: makes the tasks.
    """

    name: str
    time: float
    memory: float
    schedule: Callable[[], Machine]


PUZZLES = (
    Puzzle("0: standard training", 17, 2_600_000, standard),
    Puzzle("1: gradient accumulation", 17, 2_000_000, accumulation),
    Puzzle("2: distributed data parallel", 5, 1_800_000, data_parallel),
    Puzzle("3: weight-sharded data parallel", 20, 2_800_000, lambda: sharded(scatter=False)),
    Puzzle("4: fully-sharded data parallel", 20, 2_300_000, lambda: sharded(scatter=True)),
    Puzzle("5: pipeline parallelism", 66, 3_300_000, lambda: pipeline([range(4)])),
    Puzzle("6: GPipe schedule", 33, 4_100_000, lambda: pipeline([[b] for b in range(4)])),
    Puzzle("7: pipeline and FSDP", 15, 1_000_000, sharded_pipelines),
)


def last_start(timeline: Timeline) -> float:
    """When the last task starts: what the notebook prints as timesteps."""
    return max(float(s) for s, task in zip(timeline.start, timeline.tasks, strict=True) if task.seconds)


def peak(timeline: Timeline) -> float:
    """The most that a device holds between two tasks."""
    return max(sum(timeline.peak_memory(device).values()) for device in timeline.devices)


def picture(timeline: Timeline, cell: float, devices: Sequence[int]) -> str:
    """A line a device: forward passes by the digit of their layer, backward by its letter (a is 0), updates ``+``."""
    lines = []
    for device in devices:
        row = ["."] * round(timeline.step_seconds / cell + 0.499)
        for start, end, task in zip(timeline.start, timeline.end, timeline.tasks, strict=True):
            if task.device == device and task.stream == "compute" and task.seconds:
                layer = int(task.name[1:].split()[0])
                sign = {"F": str(layer), "B": "abcdefgh"[layer], "U": "+"}[task.name[0]]
                for at in range(
                    round(float(start) / cell), max(round(float(end) / cell), round(float(start) / cell) + 1)
                ):
                    row[min(at, len(row) - 1)] = sign
        lines.append(f"{device:2} {''.join(row)}")
    return "\n".join(lines)


def table() -> str:
    """A row for each puzzle."""
    lines = [
        "| puzzle | target | last task starts | step ends | target | memory |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for puzzle in PUZZLES:
        timeline = puzzle.schedule().run()
        times = f"{puzzle.time:g} | {last_start(timeline):.1f} | {timeline.step_seconds:.1f}"
        lines.append(f"| {puzzle.name} | {times} | {puzzle.memory:,} | {peak(timeline):,.0f} |")
    return "\n".join(lines)


def pictures() -> str:
    """The timelines, of the devices that differ."""
    shown = {5: (1.0, range(4)), 6: (0.5, range(4)), 7: (0.5, range(4))}
    found = []
    for number, puzzle in enumerate(PUZZLES):
        cell, devices = shown.get(number, (0.5, range(1)))
        found.append(f"{puzzle.name}, {cell:g} steps a sign\n{picture(puzzle.schedule().run(), cell, devices)}")
    return "\n\n".join(found)


if __name__ == "__main__":
    print(table(), pictures(), sep="\n\n")
