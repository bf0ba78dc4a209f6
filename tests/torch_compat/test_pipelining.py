"""Contracts: torch's schedules of pipelines, and what runs them."""

from __future__ import annotations

from types import SimpleNamespace

from torch.distributed.pipelining.schedules import get_schedule_class

from autopar import _torch_compat as compat


def test_schedules() -> None:
    first, second = compat.torch_schedule("LoopedBFS", 2, 1, 1)
    assert first == [(0, "F", 0), (0, "B", 0)]
    assert second == [(1, "F", 0), (1, "B", 0)]
    kinds = {kind for row in compat.torch_schedule("DualPipeV", 2, 4, 2) for _, kind, _ in row}
    assert kinds == {"F", "B", "I", "W"}
    # Sends and receives are left out, and change nothing of the order.
    stages = [SimpleNamespace(num_stages=4, group_size=2, group_rank=0, stage_index=i, submod=None) for i in range(2)]
    own = get_schedule_class("ZBVZeroBubble")(stages, 5).pipeline_order
    rows = [[(a.stage_index, a.computation_type.value, a.microbatch_index) for a in own[d] if a] for d in range(2)]
    assert compat.torch_schedule("ZBVZeroBubble", 2, 5, 2) == rows


def test_the_runtime_of_pipelines_calls_a_stage() -> None:
    """Both stages of a pipeline of one device; what a neighbor sends is handed over."""
    calls: list[tuple[str, int]] = []

    class Stage:
        num_stages, group_rank, group_size, submod, has_backward = 2, 0, 1, None, True

        def __init__(self, index: int) -> None:
            self.stage_index, self.is_first, self.is_last = index, index == 0, index == 1

        def forward_one_chunk(self, n: int, *_: object, **__: object) -> list[int]:
            calls.append(("F", self.stage_index))
            return [n]

        def set_local_fwd_input(self, outputs: list[int], n: int) -> None:
            assert outputs == [n]
            calls.append(("handed", self.stage_index))

        def backward_one_chunk(self, n: int, *, full_backward: bool, **_: object) -> None:
            calls.append(("B" if full_backward else "I", self.stage_index))

        def backward_weight_one_chunk(self, n: int, **_: object) -> None:
            calls.append(("W", self.stage_index))

        def get_local_bwd_output(self, n: int) -> list[int]:
            return [n]

        def set_local_bwd_input(self, outputs: list[int], n: int) -> None:
            calls.append(("back", self.stage_index))

    rows = [[(0, "F", 0), (1, "F", 0), (1, "I", 0), (0, "B", 0), (1, "W", 0)]]
    compat.pipeline_runtime([Stage(0), Stage(1)], rows, [0, 0], 1)()
    assert calls == [("F", 0), ("handed", 1), ("F", 1), ("I", 1), ("back", 0), ("B", 0), ("W", 1)]


def test_sends_of_stages_that_give_no_work() -> None:
    """Since 2.15 the runtime has to be told when a send is over."""
    sent: list[int] = []

    class Stage:
        num_stages, group_rank, group_size, submod, has_backward = 2, 0, 2, None, True
        stage_index, is_first, is_last = 0, True, False

        def get_fwd_send_ops(self, n: int) -> list[object]:
            sent.append(n)
            return []

        def forward_one_chunk(self, n: int, *_: object, **__: object) -> list[int]:
            return []

    rows = [[(0, "F", 0), (0, "SEND_F", 0), (0, "F", 1), (0, "SEND_F", 1)], []]
    compat.pipeline_runtime([Stage()], rows, [0, 1], 2)()
    assert sent == [0, 1]
