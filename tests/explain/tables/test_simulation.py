from autopar.explain.tables.simulation import pipeline_table

DEVICE = {
    "device": 0,
    "busy_seconds": 0.9,
    "bubble": 0.1,
    "exposed_communication_seconds": 2e-3,
    "peak_microbatches": 31 / 3,
}
FACTS = {
    "schedule": "interleaved",
    "stages": 2,
    "microbatches": 4,
    "virtual": 3,
    "step_seconds": 1,
    "bubble": 0.15,
    "devices": [DEVICE, {**DEVICE, "device": 1, "bubble": 0.2}],
}


def test_a_row_for_each_device_and_the_figures_of_the_step() -> None:
    text = pipeline_table(FACTS)
    assert ["0", "900", "ms", "10%", "2", "ms", "10.3"] in [line.split() for line in text.splitlines()]
    assert "interleaved: 2 stages of 3 virtual stages each, 4 microbatches" in text
    assert "15% of the step" in text
    assert max(map(len, pipeline_table(FACTS, width=70).splitlines())) <= 70
