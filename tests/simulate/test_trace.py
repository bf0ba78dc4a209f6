import json

import pytest

from autopar.simulate import COMMUNICATION, Task, chrome_trace, simulate


@pytest.fixture(scope="module")
def events() -> list[dict]:
    tasks = [
        Task("mm", 0, "compute", 2e-3, host=1e-3, at_start=(("activations", 8),)),
        Task("sum", 0, "gpu", 1e-3, (0,), COMMUNICATION, group=0),
        Task("sum", 4, "gpu", 1e-3, (), COMMUNICATION, group=0, at_end=(("gradients", 6), ("scratch", -2))),
    ]
    trace = json.loads(json.dumps(chrome_trace(simulate(tasks))))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    return trace["traceEvents"]


REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
}


def test_every_event_has_the_fields_of_its_phase(events: list[dict]) -> None:
    for event in events:
        assert set(event) - {"ph"} == REQUIRED[event["ph"]]
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0


def test_processes_and_threads_are_named_and_every_event_lies_on_one(events: list[dict]) -> None:
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    assert names == {
        ("process_name", 0, 0): "device 0",
        ("thread_name", 0, 1): "host launches",
        ("thread_name", 0, 2): "compute",
        ("thread_name", 0, 3): "gpu",
        ("process_name", 4, 0): "device 4",
        ("thread_name", 4, 1): "gpu",
    }
    assert all(("thread_name", e["pid"], e["tid"]) in names for e in events if e["ph"] == "X")
    assert {e["pid"] for e in events} == {0, 4}


def test_tasks_are_complete_events_in_microseconds(events: list[dict]) -> None:
    found = [(e["name"], e["cat"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert found == [
        ("mm", "launch", 0, 1, 0, pytest.approx(1000)),
        ("mm", "compute", 0, 2, pytest.approx(1000), pytest.approx(2000)),
        ("sum", "communication", 0, 3, pytest.approx(3000), pytest.approx(1000)),
        ("sum", "communication", 4, 1, pytest.approx(3000), pytest.approx(1000)),
    ]


def test_memory_is_a_counter_with_a_series_a_category(events: list[dict]) -> None:
    found = [(e["pid"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert found[-1] == (4, pytest.approx(4000), {"gradients": 6, "scratch": -2})
    assert found[0] == (0, pytest.approx(1000), {"activations": 8})
    assert all(e["name"] == "memory" for e in events if e["ph"] == "C")
