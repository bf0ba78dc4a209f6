import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import DeadlockError
from autopar.simulate import COMMUNICATION, Task, simulate

A_LOT = 20_000


def spans(tasks: list[Task]) -> list[tuple[float, float]]:
    timeline = simulate(tasks)
    return list(zip(timeline.start.tolist(), timeline.end.tolist(), strict=True))


def test_nothing_takes_no_time() -> None:
    timeline = simulate([])
    assert timeline.step_seconds == timeline.mean_bubble == 0
    assert timeline.devices == ()


def test_a_stream_runs_its_tasks_in_order_even_where_a_later_one_could_start() -> None:
    blocked = [
        Task("slow", 0, "a", 5),
        Task("waits for it", 0, "b", 1, after=(0,)),
        Task("could start at once", 0, "b", 1),
    ]
    assert spans(blocked) == [(0, 5), (5, 6), (6, 7)]


def test_streams_and_devices_run_beside_each_other() -> None:
    tasks = [Task("x", 0, "a", 2), Task("y", 0, "b", 3), Task("z", 1, "a", 4)]
    assert spans(tasks) == [(0, 2), (0, 3), (0, 4)]


def test_a_task_may_wait_for_one_that_comes_later_in_the_list() -> None:
    assert spans([Task("x", 0, "a", 1, after=(1,)), Task("y", 1, "a", 2)]) == [(2, 3), (0, 2)]


def test_launches_bound_short_tasks() -> None:
    """Four kernels of 1 s, 3 s to launch each: the host is the slower one. Launches of both streams queue up."""
    kernels = [Task(f"k{i}", 0, "a", 1, host=3) for i in range(4)]
    assert spans(kernels) == [(3, 4), (6, 7), (9, 10), (12, 13)]
    assert simulate(kernels).bubble[0] == pytest.approx(9 / 13)
    two_streams = [Task("x", 0, "a", 9, host=1), Task("y", 0, "b", 1, host=1), Task("z", 1, "a", 1, host=1)]
    assert spans(two_streams) == [(1, 10), (2, 3), (1, 2)]


def test_the_host_runs_ahead_of_long_tasks() -> None:
    assert spans([Task(f"k{i}", 0, "a", 10, host=1) for i in range(3)]) == [(1, 11), (11, 21), (21, 31)]


def test_a_group_starts_when_its_last_member_can() -> None:
    tasks = [
        Task("early", 0, "compute", 1),
        Task("late", 1, "compute", 4),
        Task("sum", 0, "link", 2, (0,), COMMUNICATION, group=7),
        Task("sum", 1, "link", 2, (1,), COMMUNICATION, group=7),
        Task("next", 0, "link", 1),
        Task("use", 1, "compute", 1, after=(3,)),
    ]
    assert spans(tasks) == [(0, 1), (0, 4), (4, 6), (4, 6), (6, 7), (6, 7)]


def test_members_of_a_group_may_take_different_times() -> None:
    tasks = [Task("sum", 0, "link", 2, group=0), Task("sum", 1, "link", 3, group=0), Task("use", 0, "compute", 1, (0,))]
    assert spans(tasks) == [(0, 2), (0, 3), (2, 3)]


def test_collectives_in_different_orders_deadlock_and_are_named() -> None:
    tasks = [
        Task("sum", 0, "link", 1, group=0),
        Task("gather", 0, "link", 1, group=1),
        Task("gather", 1, "link", 1, group=1),
        Task("sum", 1, "link", 1, group=0),
        Task("bystander", 2, "link", 1, after=(1,)),
    ]
    with pytest.raises(DeadlockError) as caught:
        simulate(tasks)
    assert str(caught.value) == (
        "deadlock: sum (device 0, link), which starts with sum (device 1, link), waits for gather (device 1, link), "
        "before it on its stream; gather (device 1, link), which starts with gather (device 0, link), waits for "
        "sum (device 0, link), before it on its stream. Put what others wait for first on its stream"
    )


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        ([Task("x", 0, "a", 1, after=(0,))], r"x \(device 0, a\) waits for x \(device 0, a\)\."),
        ([Task("x", 0, "a", 1, after=(1,)), Task("y", 0, "a", 1)], r"y \(device 0, a\) waits for x .* on its stream"),
        ([Task("x", 0, "a", 1, group=0), Task("y", 0, "a", 1, group=0)], "x .*, which starts with y .*, waits for x"),
        ([Task(f"t{i}", i, "a", 1, after=((i + 1) % 20,)) for i in range(20)], r"t7 .*; and 12 more\."),
    ],
)
def test_every_circle_is_a_deadlock(tasks: list[Task], text: str) -> None:
    with pytest.raises(DeadlockError, match=text):
        simulate([*tasks, Task("fine", 9, "a", 1)])


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Task("x", 0, "a", -1), "takes -1 seconds"),
        (Task("x", 0, "a", math.nan), "takes nan seconds"),
        (Task("x", 0, "a", math.inf), "takes inf seconds"),
        (Task("x", 0, "a", 1, host=-2), "launched in -2 seconds"),
        (Task("x", 0, "a", 1, after=(1,)), "after task 1, which is not among the 1"),
        (Task("x", 0, "a", 1, after=(-1,)), "after task -1"),
    ],
)
def test_wrong_tasks_are_refused(task: Task, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate([task])


def random_program(seed: int) -> list[Task]:
    """Three devices with two streams each; tasks wait for earlier ones only, and so cannot deadlock."""
    random = Random(seed)
    tasks: list[Task] = []
    for step in range(random.randint(1, 12)):
        devices = random.sample(range(3), random.randint(1, 3))
        stream, earlier = random.choice(("compute", "link")), len(tasks)
        group = step if len(devices) > 1 else None
        for device in sorted(devices):
            after = tuple(random.sample(range(earlier), min(earlier, random.randint(0, 3))))
            seconds, host = random.randint(0, 9), random.randint(0, 3)
            tasks.append(Task(f"t{len(tasks)}", device, stream, seconds, after, stream, host, group))
    return tasks


programs = st.integers(0, 10**9).map(random_program)


def sharing(tasks: list[Task], alone: float) -> list[Task]:
    return [replace(t, alone=alone) for t in tasks]


def test_a_device_alone_takes_the_cores_of_the_others() -> None:
    one_by_one = [Task("x", 0, "a", 2), Task("y", 1, "a", 2, after=(0,))]
    assert spans(sharing(one_by_one, 2.0)) == [(0, 1), (1, 2)]
    at_once = [Task("x", 0, "a", 4), Task("y", 1, "a", 1)]
    assert spans(sharing(at_once, 2.0)) == [(0, 2.5), (0, 1)]  # the last 3 seconds of x in half of the time
    assert spans(sharing(at_once, 1.5)) == [(0, 3), (0, 1)]
    beside = [Task("x", 0, "a", 4), Task("sent", 1, "link", 1, (), COMMUNICATION), Task("y", 1, "a", 1, after=(1,))]
    assert spans(sharing(beside, 2.0)) == [(0, 2.5), (0, 1), (1, 2)]
    with pytest.raises(DeadlockError, match=r"x .* waits for y"):
        simulate(sharing([Task("x", 0, "a", 1, after=(1,)), Task("y", 0, "a", 1)], 2.0))


@given(programs, st.floats(1.1, 4.0))
def test_sharing_cores_loses_and_makes_no_work(tasks: list[Task], alone: float) -> None:
    apart = simulate(tasks)
    nearly = simulate(sharing(tasks, 1 + 1e-12))
    assert nearly.start == pytest.approx(apart.start) and nearly.end == pytest.approx(apart.end)
    # One stream of kernels a device: the cores are never more than all of them.
    shared, devices = simulate(sharing(tasks, alone)), len({t.device for t in tasks})
    work = sum(t.seconds for t in tasks if t.category == "compute")
    assert shared.step_seconds >= work / devices - 1e-9
    assert all(e - s >= t.seconds / alone - 1e-9 for s, e, t in zip(shared.start, shared.end, tasks, strict=True))


def starts_by_definition(tasks: list[Task]) -> list[float]:
    """Push starts later until no rule is broken."""
    start = [0.0] * len(tasks)
    for _ in tasks:
        for i, task in enumerate(tasks):
            same = [
                j for j, other in enumerate(tasks[:i]) if (other.device, other.stream) == (task.device, task.stream)
            ]
            launched = sum(other.host for other in tasks[: i + 1] if other.device == task.device)
            start[i] = max([launched, start[i], *(start[j] + tasks[j].seconds for j in [*task.after, *same])])
        for i, j in itertools.permutations(range(len(tasks)), 2):
            if tasks[i].group is not None and tasks[i].group == tasks[j].group:
                start[i] = max(start[i], start[j])
    return start


@given(programs)
def test_starts_are_the_earliest_that_the_rules_allow(tasks: list[Task]) -> None:
    assert simulate(tasks).start.tolist() == starts_by_definition(tasks)


@given(programs)
def test_a_step_is_no_shorter_than_any_stream_host_or_path(tasks: list[Task]) -> None:
    timeline = simulate(tasks)
    for key in {(task.device, task.stream) for task in tasks}:
        assert timeline.step_seconds >= sum(t.seconds for t in tasks if (t.device, t.stream) == key)
    for device in timeline.devices:
        assert timeline.step_seconds >= sum(t.host for t in tasks if t.device == device)
    path = [0.0] * len(tasks)
    for i, task in enumerate(tasks):
        path[i] = task.seconds + max((path[j] for j in task.after), default=0)
    assert timeline.step_seconds >= max(path)


@given(programs, st.integers(0, 10**9))
def test_less_work_never_takes_longer(tasks: list[Task], choice: int) -> None:
    """No anomalies: the order on each stream is fixed. What waited for a removed task no longer does."""
    gone = choice % len(tasks)
    before = simulate(tasks).end.tolist()
    shorter = [replace(t, seconds=t.seconds // 2) if i == gone else t for i, t in enumerate(tasks)]
    assert all(end <= old for end, old in zip(simulate(shorter).end.tolist(), before, strict=True))
    rest = [
        replace(t, after=tuple(j - (j > gone) for j in t.after if j != gone)) for i, t in enumerate(tasks) if i != gone
    ]
    ends = simulate(rest).end.tolist()
    assert all(end <= old for end, old in zip(ends, before[:gone] + before[gone + 1 :], strict=True))


@given(programs)
def test_the_sequence_respects_what_is_waited_for(tasks: list[Task]) -> None:
    timeline = simulate(tasks)
    place = {index: at for at, index in enumerate(timeline.sequence.tolist())}
    assert sorted(place) == list(range(len(tasks)))
    assert all(place[j] < place[i] for i, task in enumerate(tasks) for j in task.after)


def test_many_tasks_are_no_matter() -> None:
    """A chain across devices, far deeper than Python's recursion."""
    tasks = [Task("t", i % 8, "compute", 1, (i - 1,) if i else ()) for i in range(A_LOT)]
    timeline = simulate(tasks)
    assert timeline.step_seconds == A_LOT
    assert timeline.busy == dict.fromkeys(range(8), A_LOT / 8)
