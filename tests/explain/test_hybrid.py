"""A hybrid plan, predicted: what a step takes with stages, data and tensor ranks."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from autopar.errors import InfeasibleError
from autopar.explain.hybrid.predict import Hybrid, predict_hybrid
from benchmarks.gpt import GPT, Block, batch_of

SEQUENCE, HIDDEN, HEADS, VOCABULARY, SAMPLES = 16, 32, 4, 96, 32


@lru_cache
def predicted(
    layers: int = 4, recompute: str = "none", schedule: str = "1f1b", virtual: int = 1, **axes: int
) -> Hybrid:
    model = GPT(HIDDEN, HEADS, layers, SEQUENCE, VOCABULARY)
    return predict_hybrid(
        model, batch_of(SAMPLES, SEQUENCE), cluster="a100-80gb", axes=axes, microbatch=2, schedule=schedule,
        recompute=recompute, virtual=virtual,
    )  # fmt: skip


@pytest.mark.slow
def test_a_step_is_its_parts() -> None:
    found = predicted(pp=2, dp=2, tp=2)
    assert found.microbatches == SAMPLES // 2 // 2
    assert len(found.forward_seconds) == len(found.backward_seconds) == 2
    assert found.step_seconds == found.pipeline_seconds + found.reduce_seconds + found.update_seconds
    assert 0 < found.bubble < 1
    assert found.reduce_seconds > 0
    assert predicted(pp=2).reduce_seconds == 0
    assert predicted(dp=2).bubble == 0


@pytest.mark.slow
def test_parameters_and_state_are_the_models() -> None:
    """Two bytes a parameter and as many of gradient; master weights and two moments of four."""
    found = predicted(dp=2)
    count = sum(p.numel() for p in GPT(HIDDEN, HEADS, 4, SEQUENCE, VOCABULARY).parameters())
    memory = found.memory_bytes
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (2 * count, 2 * count, 12 * count)
    assert predicted(tp=2).memory_bytes["parameters"] < 2 * count


@pytest.mark.slow
def test_depth_is_counted_not_captured() -> None:
    """Four layers are captured as two; two stages of them are one stage of a model half as deep, and its ends."""
    shallow, deep = predicted(4), predicted(12)
    assert deep.memory_bytes["parameters"] > 2 * shallow.memory_bytes["parameters"]
    block = (deep.forward_seconds[0] - shallow.forward_seconds[0]) / 8
    assert block * 4 < shallow.forward_seconds[0]


@pytest.mark.deep
def test_recomputation_trades_time_for_memory() -> None:
    plain, again = predicted(pp=2), predicted(recompute="full", pp=2)
    assert again.step_seconds > plain.step_seconds
    assert again.memory_bytes["activations"] < plain.memory_bytes["activations"]
    assert again.memory_bytes["recomputed"] > 0
    scores = predicted(recompute="selective", pp=2)
    assert plain.step_seconds < scores.step_seconds < again.step_seconds
    assert again.memory_bytes["activations"] < scores.memory_bytes["activations"] < plain.memory_bytes["activations"]
    assert 0 < scores.memory_bytes["recomputed"] < again.memory_bytes["recomputed"]


@pytest.mark.deep
def test_sequence_parallelism_keeps_less_also_of_one_sample() -> None:
    """One sample has no factor of rows; its sequence is found all the same."""
    kept = []
    for recipe in ("megatron", "megatron-sequence"):
        model, batch = GPT(HIDDEN, HEADS, 4, SEQUENCE, VOCABULARY), batch_of(4, SEQUENCE)
        found = predict_hybrid(model, batch, cluster="a100-80gb", axes={"pp": 2, "tp": 2}, microbatch=1, recipe=recipe)
        kept.append(found.memory_bytes["activations"])
    assert kept[1] < kept[0]


@pytest.mark.slow
def test_what_fused_kernels_save_is_left_out_of_the_graph() -> None:
    model = GPT(HIDDEN, HEADS, 4, SEQUENCE, VOCABULARY, fused=True)
    found = predict_hybrid(model, batch_of(SAMPLES, SEQUENCE), cluster="a100-80gb", axes={"pp": 2}, microbatch=2)
    assert found.step_seconds < predicted(pp=2).step_seconds


@pytest.mark.slow
def test_interleaved_runs_idle_less_and_hold_more() -> None:
    one, two = predicted(pp=2), predicted(schedule="interleaved", virtual=2, pp=2)
    assert two.bubble < one.bubble
    assert len(two.forward_seconds) == 4
    assert two.memory_bytes["activations"] > one.memory_bytes["activations"]
    whole = [sum(found.forward_seconds) + sum(found.backward_seconds) for found in (one, two)]
    assert whole[0] == pytest.approx(whole[1], rel=0.05)  # but for hosts that are slower in one part than in another
    assert (two.memory_bytes["parameters"], two.update_seconds) == pytest.approx(
        (one.memory_bytes["parameters"], one.update_seconds), rel=0.5
    )  # the embedding and the head stay where they are, blocks move
    with pytest.raises(ValueError, match="1f1b has one stage a device"):
        predicted(virtual=2, pp=2)


@pytest.mark.deep
def test_gpipe_takes_the_time_of_1f1b_and_more_memory() -> None:
    gpipe, one = (predicted(schedule=schedule, pp=4) for schedule in ("gpipe", "1f1b"))
    assert gpipe.memory_bytes["activations"] > one.memory_bytes["activations"]


@pytest.mark.parametrize(
    ("axes", "microbatch", "message"),
    [
        ({"gpu": 2}, 2, "axis 'gpu' of a hybrid plan has no known role; name axes stage, pp"),
        ({"dp": 3}, 2, "32 samples do not divide over 3 data ranks"),
        ({"dp": 2}, 3, "microbatches of 3 do not divide the 16 samples"),
        ({"pp": 3}, 2, "3 stages do not divide 4 repeated blocks"),
    ],
)
def test_wrong_sizes_are_named(axes: dict[str, int], microbatch: int, message: str) -> None:
    model = GPT(HIDDEN, HEADS, 4, SEQUENCE, VOCABULARY)
    with pytest.raises(ValueError, match=message):
        predict_hybrid(model, batch_of(SAMPLES, SEQUENCE), cluster="a100-80gb", axes=axes, microbatch=microbatch)


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_a_remedy() -> None:
    model = GPT(HIDDEN, HEADS, 4, SEQUENCE, VOCABULARY)
    with pytest.raises(InfeasibleError, match=r"more than the budget of .*; most of it is"):
        predict_hybrid(model, batch_of(SAMPLES, SEQUENCE), cluster="a100-80gb", axes={}, memory="1MiB")


@pytest.mark.parametrize("batch", [(), (torch.zeros(()),)])
def test_a_batch_without_samples_is_named(batch: tuple[torch.Tensor, ...]) -> None:
    model = GPT(HIDDEN, HEADS, 4, SEQUENCE, VOCABULARY)
    with pytest.raises(ValueError, match="does not begin with a tensor of samples"):
        predict_hybrid(model, batch, cluster="a100-80gb", axes={"dp": 2})


@pytest.mark.slow
def test_a_model_that_reads_the_number_of_its_blocks_is_captured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> GPT:
        made = GPT(HIDDEN, HEADS, 4, SEQUENCE, VOCABULARY)
        for i, layer in enumerate(made.layers):
            layer.number = i
        return made

    def predict() -> Hybrid:
        return predict_hybrid(model(), batch_of(SAMPLES, SEQUENCE), cluster="a100-80gb", axes={"dp": 2}, microbatch=2)

    forward = Block.forward
    assert predict() == predicted(dp=2)  # nobody reads it
    monkeypatch.setattr(Block, "forward", lambda self, x: forward(self, x) * float(self.number + 1))
    found = predict()
    assert found.memory_bytes["parameters"] == predicted(dp=2).memory_bytes["parameters"]
    assert found.forward_seconds[0] > predicted(dp=2).forward_seconds[0]
