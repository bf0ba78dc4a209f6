import json
import os
from pathlib import Path

import numpy as np
import pytest

from autopar.simulate import COMMUNICATION, Action, Task, Timeline, order, pipeline, simulate

SIZES = [(1, 4), (2, 2), (3, 9), (4, 8), (8, 24)]


def run(schedule: str, stages: int, microbatches: int, virtual: int = 1, communication: float = 0) -> Timeline:
    """A microbatch takes a device 2 s forward, 2 and 2 s backward, and holds one byte of it."""
    rows = order(schedule, stages, microbatches, virtual)
    return simulate(pipeline(rows, 2 / virtual, 2 / virtual, 2 / virtual, communication, saved=1 / virtual))


def in_flight(timeline: Timeline) -> list[float]:
    return [timeline.peak_memory(device)["activations"] for device in timeline.devices]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_is_idle_in_p_less_1_of_m_plus_p_less_1_slots(p: int, m: int) -> None:
    """Equation of GPipe, section 2.3; every microbatch is in flight."""
    timeline = run("gpipe", p, m)
    assert timeline.bubble == pytest.approx(dict.fromkeys(range(p), (p - 1) / (m + p - 1)))
    assert in_flight(timeline) == [m] * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_takes_as_long_and_holds_less(p: int, m: int) -> None:
    timeline = run("1f1b", p, m)
    assert timeline.step_seconds == pytest.approx(run("gpipe", p, m).step_seconds)
    assert in_flight(timeline) == [min(m, p - stage) for stage in range(p)]


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 6), (4, 8), (8, 24)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaving_divides_the_bubble(p: int, m: int, v: int) -> None:
    """Megatron (arXiv 2104.04473), section 2.2: a bubble of (p - 1) / v slots beside m; more activations."""
    timeline = run("interleaved", p, m, v)
    assert timeline.mean_bubble == pytest.approx((p - 1) / (v * m + p - 1))
    warmup = [min(m * v, (v - 1) * p + 2 * (p - 1 - device) + 1) / v for device in range(p)]
    assert in_flight(timeline) == pytest.approx(warmup)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24)])
def test_zero_bubble_h1_is_idle_a_third_as_long(p: int, m: int) -> None:
    """Zero bubble (arXiv 2401.10241), table 1: (p - 1) (F + B - W) for (p - 1) (F + B + W); p microbatches held."""
    timeline = run("zb-h1", p, m)
    assert timeline.step_seconds == pytest.approx(6 * m + 2 * (p - 1))
    assert in_flight(timeline) == [p] * p


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (8, 24)])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 1, 3), (5, 7, 3)])
@pytest.mark.parametrize(
    ("schedule", "v", "passes"), [("looped-bfs", 2, 1), ("breadth-first", 3, 1), ("breadth-first-v", 2, 2)]
)
def test_breadth_first_waits_once_for_the_others(
    p: int, m: int, times: tuple[int, int, int], schedule: str, v: int, passes: int
) -> None:
    """Breadth-first pipelines (arXiv 2211.05953): p - 1 slots of a stage; bent to a V, both ways wait."""
    timeline = simulate(pipeline(order(schedule, p, m, v), *times))
    assert timeline.step_seconds == pytest.approx((m * v + passes * (p - 1)) * sum(times))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (8, 24)])
@pytest.mark.parametrize("schedule", ["zbv", "dualpipe-v"])
def test_a_v_of_alike_parts_waits_for_its_start_only(p: int, m: int, schedule: str) -> None:
    """Zero bubble (arXiv 2401.10241), ZB-V: with F = B = W no device waits, once the first microbatch is there."""
    timeline = simulate(pipeline(order(schedule, p, m, 2), 1, 1, 1))
    assert timeline.step_seconds == 6 * m + p - 1
    if schedule == "zbv":
        assert timeline.busy == dict.fromkeys(range(p), 6 * m)
        for device in range(p):
            own = [i for i, task in enumerate(timeline.tasks) if task.device == device]
            assert timeline.end[own].max() - timeline.start[own].min() == 6 * m


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (1, 2, 1), (3, 1, 1), (5, 7, 3)])
def test_dualpipe_waits_no_longer_than_its_authors_say(times: tuple[int, int, int]) -> None:
    """DualPipeV's README: (p - 1) (F&B + B - 3 W), F and B one behind the other here; torch's order leaves less."""
    forward, for_input, for_weights = times
    for p, m in ((2, 4), (4, 8), (8, 24)):
        waits = simulate(pipeline(order("dualpipe-v", p, m, 2), *times)).step_seconds - 2 * m * sum(times)
        assert 0 < waits <= (p - 1) * (forward + 2 * for_input - for_weights)


def test_the_input_part_gives_back_what_the_weights_do_not_need() -> None:
    rows = order("zb-h1", 1, 1)
    times, held = simulate(pipeline(rows, 1, 1, 1, saved=8, saved_for_weight=3)).memory(0)
    assert (times.tolist(), held["activations"].tolist()) == ([0, 2, 3], [8, 3, 0])


def test_a_timeline_by_hand() -> None:
    """Two stages, two microbatches, F = 2, B = 3 (1 and 2), 1 under way.

    device 0: F0 0-2, F1 2-4, B0 9-12, B1 14-17
    device 1: F0 3-5, B0 5-8, F1 8-10, B1 10-13
    """
    timeline = simulate(pipeline(order("1f1b", 2, 2), 2, 1, 2, 1))
    found = {
        task.name: (start, end) for task, start, end in zip(timeline.tasks, timeline.start, timeline.end, strict=True)
    }
    assert found == {
        "F0 of stage 0": (0, 2),
        "F1 of stage 0": (2, 4),
        "receive for B0 of stage 0": (8, 9),
        "B0 of stage 0": (9, 12),
        "receive for B1 of stage 0": (13, 14),
        "B1 of stage 0": (14, 17),
        "receive for F0 of stage 1": (2, 3),
        "F0 of stage 1": (3, 5),
        "B0 of stage 1": (5, 8),
        "receive for F1 of stage 1": (4, 5),
        "F1 of stage 1": (8, 10),
        "B1 of stage 1": (10, 13),
    }
    assert timeline.exposed_communication == {0: 2, 1: 1}
    assert timeline.bubble == pytest.approx({0: 7 / 17, 1: 7 / 17})


def test_messages_occupy_both_ends() -> None:
    """Of two stages the one with the most to do sends two results and receives two gradients, half a second each."""
    rows = order("1f1b", 2, 2)
    free, taken = (simulate(pipeline(rows, 2, 1, 2, 1, occupied=seconds)) for seconds in (0.0, 0.5))
    assert taken.busy == pytest.approx({device: seconds + 4 * 0.5 for device, seconds in free.busy.items()})
    assert taken.step_seconds > free.step_seconds
    alone = order("interleaved", 1, 2, virtual=2)  # stages of one device pass values on in memory
    assert (
        simulate(pipeline(alone, 1, 1, 1, 9, occupied=3)).step_seconds
        == simulate(pipeline(alone, 1, 1, 1)).step_seconds
    )


def test_stages_may_differ() -> None:
    """The last stage takes longest: it works without a pause from its first microbatch on."""
    rows = order("1f1b", 3, 5)
    tasks = pipeline(rows, [1, 1, 4], [1, 1, 4], [0, 0, 4], [0.5, 0.25], saved=[1, 2, 3])
    timeline = simulate(tasks)
    assert timeline.step_seconds == pytest.approx(1 + 0.5 + 1 + 0.25 + 5 * 12 + 0.25 + 1 + 0.5 + 1)
    assert timeline.busy == {0: 10, 1: 10, 2: 60}
    assert in_flight(timeline) == [3, 4, 3]


def test_stages_of_one_device_pass_on_at_once() -> None:
    """Two stages folded over one device, and a V over two: stages 1 and 2 on device 1."""
    folded = pipeline(order("interleaved", 1, 2, virtual=2), 1, 1, 1, 9)
    assert not any(task.category == COMMUNICATION for task in folded)
    chain = [(0, 0), (1, 1), (2, 1), (3, 0)]
    v_shape = tuple(
        tuple(
            [Action(s, "F", 0) for s, d in chain if d == device]
            + [Action(s, "B", 0) for s, d in chain[::-1] if d == device]
        )
        for device in range(2)
    )
    timeline = simulate(pipeline(v_shape, 1, 1, 1, [10, 20, 30]))
    assert timeline.step_seconds == 4 * 3 + 2 * (10 + 30)


def test_parts_of_a_backward_may_be_mixed_with_whole_ones() -> None:
    rows = (
        (Action(0, "F", 0), Action(0, "B", 0)),
        (Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)),
    )
    assert simulate(pipeline(rows, 1, 2, 3)).step_seconds == 1 + 1 + 2 + 5


def test_launches_count() -> None:
    tasks = pipeline(order("1f1b", 1, 3), 1, 1, 1, host=5)
    assert simulate(tasks).step_seconds == 6 * 5 + 2


F, B = Action(0, "F", 0), Action(0, "B", 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "no device works on stage 0"),
        (((F, B), (Action(2, "F", 0),)), "no device works on stage 1"),
        (((F, B), (F,)), "stage 0 is on devices 0 and 1"),
        (((F, F, B),), "F0 of stage 0 is there twice"),
        (((B,),), "B0 of stage 0 needs F0 of stage 0, which no device does"),
        (((F, B), (Action(1, "F", 0),)), "B0 of stage 0 needs B0 of stage 1 or I0 of stage 1"),
    ],
)
def test_orders_of_less_than_a_step_are_refused(rows: tuple[tuple[Action, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(rows, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "value"), [("forward", [1, 2, 3]), ("communication", [1, 2]), ("saved", [[1, 2]]), ("backward_weight", [])]
)
def test_numbers_must_be_as_many_as_stages(name: str, value: list[float]) -> None:
    arguments = {"forward": 1, "backward_input": 1, "backward_weight": 1, name: value}
    with pytest.raises(ValueError, match=f"{name} has shape .*; give one number, or [12] in a row"):
        pipeline(order("1f1b", 2, 2), **arguments)


@pytest.mark.parametrize("communication", [-1, np.nan])
def test_wrong_durations_are_found_by_the_simulation(communication: float) -> None:
    with pytest.raises(ValueError, match=r"receive for B0 of stage 0 .* takes (-1.0|nan) seconds"):
        simulate(pipeline(order("1f1b", 2, 2), 1, 1, 1, communication))


def published() -> list[tuple[dict[str, float], dict[str, float]]]:
    """Measured durations and bubble rates of each model, zero bubble (arXiv 2401.10241), tables 9 and 5."""
    path = Path(os.environ.get("AUTOPAR_DATA", ""), "published", "zero_bubble.json")
    if not path.is_file():
        pytest.skip("set AUTOPAR_DATA to a folder with published/zero_bubble.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    measured, rates = (
        [dict(zip(data[table]["columns"], row, strict=True)) for row in data[table]["rows"]]
        for table in ("durations_ms", "bubble_rate")
    )
    return list(zip(measured, rates, strict=True))


def bubble(given: dict[str, float], schedule: str, virtual: int = 1) -> float:
    """With the measured durations."""
    rows = order(schedule, int(given["stages"]), int(given["microbatches"]), virtual)
    ahead, for_input, for_weights = (given[n] / virtual for n in ("forward", "backward_input", "backward_weight"))
    return simulate(pipeline(rows, ahead, for_input, for_weights, given["communication"])).mean_bubble


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_published_bubble_rates(schedule: str) -> None:
    """To four digits."""
    for given, expected in published():
        assert round(bubble(given, schedule), 4) == expected[schedule.upper()], given["model"]


def test_published_bubble_rates_of_interleaving() -> None:
    """A stage for each layer; the paper's convention is another one, by about 3%."""
    layers = {"1.5B": 22, "6.2B": 30}  # one fewer on the first and the last device
    for given, expected in published():
        virtual = (layers[str(given["model"])] + 2) // int(given["stages"])
        assert bubble(given, "interleaved", virtual) == pytest.approx(expected["interleaved_1F1B"], rel=0.035)


def test_schedules_are_in_the_published_order() -> None:
    for given, expected in published():
        ours = {"1F1B": bubble(given, "1f1b"), "ZB-H1": bubble(given, "zb-h1")}
        ours["interleaved_1F1B"] = bubble(given, "interleaved", {"1.5B": 3, "6.2B": 4}[str(given["model"])])
        assert sorted(ours, key=ours.__getitem__) == sorted(ours, key=expected.__getitem__)
        assert bubble(given, "zbv", 2) < expected["ZB-H1"]  # the first without a bubble, in the memory of 1F1B


def test_tasks_of_a_stage_are_in_the_order_of_its_actions() -> None:
    tasks = pipeline(order("zb-h1", 2, 2), 1, 1, 1, 1)
    names = [task.name for task in tasks if task.device == 1 and task.category == "compute"]
    assert names == [str(action) for action in order("zb-h1", 2, 2)[1]]
    assert all(isinstance(task, Task) for task in tasks)
