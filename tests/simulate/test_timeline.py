import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.simulate import COMMUNICATION, Task, Timeline, simulate


def communication(seconds: float, after: tuple[int, ...] = (), stream: str = "link") -> Task:
    return Task("move", 0, stream, seconds, after, COMMUNICATION)


def test_communication_is_exposed_where_no_computation_hides_it() -> None:
    """Computation runs from 0 to 4 and from 7 to 8, communication from 0 to 7."""
    timeline = simulate([Task("x", 0, "compute", 4), communication(7), Task("y", 0, "compute", 1, (1,))])
    assert timeline.step_seconds == 8
    assert timeline.busy == {0: 5}
    assert timeline.exposed_communication == {0: 3}
    assert timeline.bubble == {0: pytest.approx(3 / 8)}


def test_communication_on_two_levels_at_once_is_exposed_once() -> None:
    tasks = [Task("x", 0, "compute", 1), communication(5, (0,), "gpu"), communication(3, (0,), "node")]
    assert simulate(tasks).exposed_communication == {0: 5}


def test_communication_on_the_compute_stream_is_exposed_whole() -> None:
    tasks = [Task("x", 0, "compute", 2), communication(3, stream="compute"), Task("y", 0, "compute", 1)]
    timeline = simulate(tasks)
    assert timeline.exposed_communication == {0: 3}
    assert timeline.busy == {0: 3}


def test_idling_and_other_categories_are_neither() -> None:
    tasks = [Task("x", 0, "compute", 2), Task("pause", 0, "compute", 5, category="wait"), Task("y", 1, "compute", 1)]
    timeline = simulate(tasks)
    assert timeline.busy == {0: 2, 1: 1}
    assert timeline.exposed_communication == {0: 0, 1: 0}
    assert timeline.bubble == {0: pytest.approx(5 / 7), 1: pytest.approx(6 / 7)}
    assert timeline.mean_bubble == pytest.approx(11 / 14)


def test_memory_is_a_running_sum_by_category() -> None:
    tasks = [
        Task("load", 0, "compute", 0, at_start=(("parameters", 100),)),
        Task("forward", 0, "compute", 2, at_start=(("activations", 30), ("scratch", 5)), at_end=(("scratch", -5),)),
        Task("backward", 0, "compute", 3, at_start=(("gradients", 50),), at_end=(("activations", -30),)),
        Task("elsewhere", 1, "compute", 1, at_start=(("activations", 1),)),
    ]
    times, held = (timeline := simulate(tasks)).memory(0)
    assert times.tolist() == [0, 0, 2, 2, 5]
    assert {name: sizes.tolist() for name, sizes in held.items()} == {
        "activations": [0, 30, 30, 30, 0],
        "gradients": [0, 0, 0, 50, 50],
        "parameters": [100, 100, 100, 100, 100],
        "scratch": [0, 5, 0, 0, 0],
    }
    assert timeline.peak_memory(0) == {"activations": 30, "gradients": 50, "parameters": 100, "scratch": 0}
    assert timeline.peak_memory(1) == {"activations": 1}
    assert timeline.peak_memory(2) == {}


def test_at_one_moment_what_ends_gives_back_before_others_take() -> None:
    """Whatever the order of the list: b starts when a ends, on another stream."""
    held = {"at_start": (("x", 10.0),), "at_end": (("x", -10.0),)}
    a, b = Task("a", 0, "s", 1, **held), Task("b", 0, "t", 1, (0,), **held)
    assert simulate([a, b]).peak_memory(0) == {"x": 10}
    late = Task("late", 0, "u", 1, host=1, **held)
    assert simulate([late, Task("a", 0, "s", 1, host=1, **held)]).peak_memory(0) == {"x": 10}


def test_a_task_without_duration_holds_what_it_takes_for_a_moment() -> None:
    moment = Task("moment", 0, "compute", 0, at_start=(("x", 7),), at_end=(("x", -7),))
    timeline = simulate([Task("a", 0, "compute", 1, at_start=(("x", 1),)), moment])
    assert timeline.memory(0)[1]["x"].tolist() == [1, 8, 1]
    assert timeline.peak_memory(0) == {"x": 8}


def test_plain_data_is_json() -> None:
    timeline = simulate([Task("x", 3, "compute", 4, at_start=(("activations", 8),)), Task("y", 3, "link", 5)])
    assert json.loads(json.dumps(timeline.to_dict())) == {
        "step_seconds": 5,
        "bubble": 0,
        "devices": [
            {
                "device": 3,
                "busy_seconds": 5,
                "bubble": 0,
                "exposed_communication_seconds": 0,
                "peak_memory_bytes": {"activations": 8},
            }
        ],
    }


def random_timeline(seed: int) -> Timeline:
    """Durations, waits and memory of a few tasks on one device; each gives back what it took."""
    random = Random(seed)
    tasks: list[Task] = []
    for index in range(random.randint(1, 8)):
        category = random.choice(("compute", COMMUNICATION, "wait"))
        after = tuple(random.sample(range(index), min(index, random.randint(0, 2))))
        taken, given_back = ((("x", size),) for size in (index + 1, -index - 1))
        seconds, stream = random.randint(0, 4), random.choice("ab")
        tasks.append(Task(f"t{index}", 0, stream, seconds, after, category, at_start=taken, at_end=given_back))
    return simulate(tasks)


timelines = st.integers(0, 10**9).map(random_timeline)


@given(timelines)
def test_figures_agree_with_a_look_at_every_second(timeline: Timeline) -> None:
    seconds = range(int(timeline.step_seconds))

    def runs(second: int, category: str) -> bool:
        spans = zip(timeline.tasks, timeline.start, timeline.end, strict=True)
        return any(task.category == category and start <= second < end for task, start, end in spans)

    assert timeline.busy[0] == sum(runs(s, "compute") for s in seconds)
    exposed = sum(runs(s, COMMUNICATION) and not runs(s, "compute") for s in seconds)
    assert timeline.exposed_communication[0] == exposed


@given(timelines)
def test_memory_never_falls_below_nothing_and_all_is_given_back(timeline: Timeline) -> None:
    times, held = timeline.memory(0)
    assert (times[1:] >= times[:-1]).all()
    assert (held["x"] >= 0).all()
    assert held["x"][-1] == 0
    most = max(
        sum(
            task.at_start[0][1]
            for task, a, b in zip(timeline.tasks, timeline.start, timeline.end, strict=True)
            if a <= t < b
        )
        for t in (*timeline.start, -1)
    )
    assert timeline.peak_memory(0)["x"] >= most
