"""`capture`: one program for any model, and errors that say which line of the user's to change."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.compiler import program_of
from autopar.errors import CaptureError, MissingRuleError
from autopar.ir.program import Input, Output, Program
from autopar.ir.signature import pytree
from autopar.parallelize import parallelize
from autopar.sharding.dims import analyze
from autopar.verify.emulate import run_whole
from tests import models

torch.library.define("autopar_tests::twice", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("autopar_tests::twice", "CompositeExplicitAutograd")
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.register_fake("autopar_tests::twice")
def _twice_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_autograd("autopar_tests::twice", lambda ctx, grad: grad * 2)


def kinds(program: Program) -> Counter[str]:
    return Counter(i.kind for i in program.inputs) + Counter(o.kind for o in program.outputs)


def named(program: Program, kind: str) -> list[str]:
    found = [i.name for i in program.inputs if i.kind == kind]
    return found or [o.name for o in program.outputs if o.kind == kind]


class Scalarless(nn.Module):
    """Returns logits: its outputs carry gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_own_loss() -> None:
    program = capture(*models.mlp())
    assert program.loss == 0
    assert named(program, "parameter") == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert named(program, "gradient") == named(program, "parameter")
    assert named(program, "batch") == ["0", "1"]
    assert named(program, "tangent") == ["0"]
    assert program.forward_outputs == 1
    assert program.unused == ()
    assert all(v is not None for v in program.output_values)


def test_meta_and_fake_models_give_the_same_program() -> None:
    model, batch = models.mlp()
    expected = program_of(model, batch).fingerprint
    meta = {k: v.to("meta") for k, v in batch.items()}
    with torch.device("meta"):
        assert program_of(models.Mlp(16, 32), meta).fingerprint == expected
    with FakeTensorMode() as mode:
        fake = models.Mlp(16, 32)
        fakes = {k: mode.from_tensor(v) for k, v in batch.items()}
    assert program_of(fake, batch).fingerprint == expected
    assert program_of(fake, fakes).fingerprint == expected


def test_dict_and_tuple_batches_give_the_same_program() -> None:
    model, batch = models.mlp()
    expected = capture(model, batch).fingerprint
    assert capture(model, (batch["x"], batch["y"])).fingerprint == expected
    assert capture(model, [batch["x"], batch["y"]]).fingerprint == expected


def test_loss_fn_sees_output_and_batch() -> None:
    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (output - batch["x"][:, :4]).pow(2).sum()

    program = capture(Scalarless(), {"x": torch.randn(8, 8)}, loss_fn=loss)
    assert program.loss == 0
    assert kinds(program)["result"] == 1


def test_loss_fn_that_is_no_scalar() -> None:
    with pytest.raises(CaptureError, match="must return a scalar"):
        capture(Scalarless(), (torch.randn(8, 8),), loss_fn=lambda output, batch: output)


def test_no_scalar_gives_a_tangent_for_each_output() -> None:
    program = capture(Scalarless(), (torch.randn(8, 8),))
    assert program.loss is None
    assert named(program, "tangent") == ["0"]
    assert named(program, "gradient") == ["linear.weight", "linear.bias"]


@pytest.mark.slow
def test_results_beside_a_loss_are_detached() -> None:
    program = capture(*models.encoder())
    assert program.loss == 0
    assert named(program, "tangent") == ["0"]
    assert kinds(program)["result"] == 2
    assert set(pytree.unflatten(program.skeleton, ["a", "b"])) == {"loss", "logits"}


def test_inference() -> None:
    model, batch = models.mlp()
    with torch.no_grad():
        program = capture(model.eval(), batch)
    assert not program.training
    assert program.loss is None
    assert kinds(program) == Counter(parameter=4, batch=2, result=1)
    assert capture(model, batch, training=False).training is False
    assert capture(model, batch).training  # eval mode alone keeps gradients, as in torch


def test_eval_mode_changes_the_graph() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    assert "dropout" in str(capture(model, (torch.randn(8, 8),)).graph.graph)
    assert "dropout" not in str(capture(model.eval(), (torch.randn(8, 8),)).graph.graph)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("make", "tied"), [(models.gpt2, "lm_head.weight"), (models.bert, "cls.predictions.decoder.weight")]
)
def test_tied_parameters_are_one(make: Callable[[], Any], tied: str) -> None:
    model, batch = make()
    program = capture(model, batch)
    distinct = [n for n, _ in model.named_parameters()]
    assert sorted(named(program, "parameter")) == sorted(distinct)
    gradients = [o.name for o in program.outputs if o.kind == "gradient"]
    assert sorted(gradients) == sorted(distinct)
    assert program.aliases[tied] in distinct
    assert tied not in distinct


def test_gradients_of_tied_parameters_are_added() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)
            self.b = nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu()).sum()

    torch.manual_seed(0)
    model, x = Tied(), torch.randn(8, 8)
    program = capture(model, (x,))
    assert program.inputs == (Input("parameter", "a.weight"), Input("batch", "0"), Input("tangent", "0"))
    assert program.outputs == (Output("result", "0"), Output("gradient", "a.weight"))
    assert program.aliases == {"b.weight": "a.weight"}
    _, gradient = run_whole(program, [model.a.weight.detach(), x, torch.ones(())])
    model(x).backward()
    assert gradient is not None
    torch.testing.assert_close(gradient, model.a.weight.grad)


def test_buffer_update_is_an_output() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return (self.linear(x) * self.scale).sum()

    model, batch = Counting(), (torch.randn(8, 8),)
    program = program_of(model, batch)
    assert [o for o in program.outputs if o.kind == "buffer"] == [Output("buffer", "steps")]
    assert program.outputs[0].kind == "buffer"
    assert program.forward_outputs == 2
    assert float(model.steps) == 0
    values = {"steps": torch.tensor(4.0), "scale": model.scale} | dict(model.named_parameters())
    inputs = [values[i.name] if i.kind in ("buffer", "parameter") else batch[0] for i in program.inputs[:-1]]
    assert run_whole(program, [*inputs, torch.ones(())])[0] == torch.tensor(5.0)


def test_writing_to_the_batch_is_an_error() -> None:
    class Writing(Scalarless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.linear(x)

    with pytest.raises(CaptureError, match="writes to its batch '0' in place; write to a copy"):
        capture(Writing(), (torch.randn(8, 8),))


def test_frozen_parameters_have_no_gradient() -> None:
    model, batch = models.mlp()
    model.up.weight.requires_grad_(False)
    program = capture(model, batch)
    assert named(program, "parameter") == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert [o.name for o in program.outputs if o.kind == "gradient"] == ["up.bias", "down.weight", "down.bias"]
    assert program.unused == ()


def test_all_parameters_frozen_is_inference() -> None:
    model, batch = models.mlp()
    assert not capture(model.requires_grad_(False), batch).training


def test_unused_parameter() -> None:
    class Spare(Scalarless):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(8, 4)

    program = capture(Spare(), (torch.randn(8, 8),))
    assert program.unused == ("spare.bias", "spare.weight")
    gradients = {o.name: v for o, v in zip(program.outputs, program.output_values, strict=True) if o.kind == "gradient"}
    assert [n for n, v in gradients.items() if v is not None] == ["linear.weight", "linear.bias"]


def test_unused_parameter_beside_code_for_compilers() -> None:
    """Whose operators of eager mode fake tensors do not have in float32, as grouped products."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.spare = nn.Parameter(torch.randn(2, 16, 16)), nn.Parameter(torch.randn(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return torch.bmm(x.unflatten(0, (2, -1)), self.w).flatten(0, 1)
            return torch._grouped_mm(x, self.w, offs=torch.tensor([4, 8], dtype=torch.int32))

    assert capture(Grouped(), (torch.randn(8, 16),)).unused == ("spare",)


class Checkpointed(Scalarless):
    def __init__(self, reentrant: bool, first: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.reentrant, self.options = reentrant, options
        self.first = first or nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(checkpoint(self.first, x, use_reentrant=self.reentrant, **self.options)).sum()


def test_checkpointing() -> None:
    program = capture(Checkpointed(False), (torch.randn(8, 8),))
    assert len([o for o in program.outputs if o.kind == "gradient"]) == 4
    assert program.unused == ()


def test_reentrant_checkpointing_of_what_needs_no_gradient_gives_none(caplog: pytest.LogCaptureFixture) -> None:
    """So does torch: the values are those of the plain model, which a warning says."""
    program = capture(Checkpointed(True), (torch.randn(8, 8),))
    assert program.unused == ("first.bias", "first.weight")
    assert "pass use_reentrant=False" in caplog.text


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_draws_other_numbers_is_an_error(reentrant: bool) -> None:
    """Eager mode's gradients are of other numbers than its loss."""
    x = torch.randn(8, 8, requires_grad=True)
    capture(Checkpointed(reentrant, preserve_rng_state=False), (x,))
    model = Checkpointed(reentrant, nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), preserve_rng_state=False)
    with pytest.raises(
        CaptureError, match=r"draws random numbers \(aten.native_dropout.*leave preserve_rng_state=False"
    ):
        capture(model, (x,))


class OwnCheckpoint(torch.autograd.Function):
    """Checkpointing by hand, as libraries have it: the backward pass runs a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def test_other_checkpointing_is_an_error() -> None:
    class Own(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OwnCheckpoint.apply(self.first, x + self.linear.bias.sum()).sum()

    with pytest.raises(CaptureError, match=r"torch.utils.checkpoint is understood"):
        capture(Own(True), (torch.randn(8, 8),))

    class Beside(Checkpointed):
        """Parameters get a part of their gradients in the graph: the rest may not be lost in silence."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.linear.bias.sum()
            return (OwnCheckpoint.apply(self.first, x).sin() + self.first(x)).sum()

    with pytest.raises(CaptureError, match=r"parameter 'first.*reversible=False"):
        capture(Beside(True), (torch.randn(8, 8),))


def test_control_flow_on_data_names_the_line() -> None:
    class Branching(Scalarless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:  # the line to name
                x = x + 1
            return self.linear(x)

    with pytest.raises(
        CaptureError, match=r"depends on data at .*test_export\.py:\d+: if x\.sum\(\) > 0.*torch\.where"
    ):
        capture(Branching(), (torch.randn(8, 8),))


def test_error_in_the_model_names_the_line(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Scalarless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x @ x)

    with pytest.raises(
        CaptureError, match=r"cannot capture the model at .*test_export\.py:\d+: return self\.linear\(x @ x\)"
    ):
        capture(Wrong(), (torch.randn(4, 8),))
    assert not [r for r in caplog.records if r.levelname == "ERROR"]  # torch's own, with a traceback


def test_error_where_a_model_thinks_it_is_compiled() -> None:
    class Asking(Scalarless):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if mask is None and not torch.compiler.is_compiling():
                mask = torch.ones_like(x)
            return self.linear(x * mask)

    with pytest.raises(
        CaptureError, match=r"Asking\.forward \(.*test_export\.py:\d+\) leaves out .*pass what it makes"
    ):
        capture(Asking(), (torch.randn(4, 8),))


def test_a_random_operator_without_a_rule_says_what_to_do() -> None:
    class Binomial(Scalarless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.binomial(x.detach(), x.detach()))

    with pytest.raises(MissingRuleError, match=r"aten.binomial.*draw with torch.rand"):
        analyze(program_of(Binomial(), (torch.ones(4, 8),)))


def test_model_without_parameters() -> None:
    with pytest.raises(CaptureError, match="ReLU has no parameters"):
        capture(nn.ReLU(), (torch.randn(8),))


@torch.library.custom_op("autopar_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_missing_rule_names_operator_node_line_and_remedy() -> None:
    class Custom(Scalarless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(noise(x.detach()))

    with pytest.raises(
        MissingRuleError,
        match=r"autopar_tests\.noise\.default; it is random.* \(node noise\w*, .*\.py:\d+\).*autopar\.rule",
    ):
        analyze(program_of(Custom(), (torch.randn(8, 8),)))


def test_cache_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = models.gpt2(use_cache=True)
    with caplog.at_level(logging.INFO, "autopar"):
        program = capture(model, batch)
    assert "past_key_values" in caplog.text
    assert kinds(program)["result"] == 2  # loss and logits


def test_structure_of_the_output_is_kept() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    model, batch = models.gpt2(output_hidden_states=True)
    program = capture(model, batch)
    output = pytree.unflatten(program.skeleton, list(range(kinds(program)["result"])))
    assert type(output) is CausalLMOutputWithCrossAttentions
    assert (output.loss, output.logits, output.hidden_states) == (0, 1, (2, 3))


def test_output_of_an_unknown_kind() -> None:
    class Odd(Scalarless):
        def forward(self, x: torch.Tensor) -> object:
            return {"out": self.linear(x), "odd": object()}

    with pytest.raises(CaptureError, match=r"the model's output\['odd'\] is a object"):
        capture(Odd(), (torch.randn(8, 8),))


def test_no_output() -> None:
    class Silent(Scalarless):
        def forward(self, x: torch.Tensor) -> object:
            return {"n": 1}

    with pytest.raises(CaptureError, match="returns no tensor"):
        capture(Silent(), (torch.randn(8, 8),))


def test_model_is_not_changed() -> None:
    model, batch = models.encoder()
    before = {k: (id(v), v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    modules = list(map(id, model.modules()))
    capture(model, batch)
    after = model.state_dict(keep_vars=True)
    assert modules == list(map(id, model.modules()))
    assert all(id(after[k]) == i and torch.equal(after[k], v) for k, (i, v) in before.items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training
    assert not any("Harness" in repr(k) for m in model.modules() for k in vars(m))


def test_captured_graph_computes_what_the_model_does() -> None:
    for make in (models.mlp, models.cnn, models.encoder):
        model, batch = make()
        program = program_of(model, batch)
        named_ = dict(model.named_parameters()) | dict(model.named_buffers())
        tensors = list(batch.values())
        values = [
            torch.ones(())
            if i.kind == "tangent"
            else tensors[int(i.name)]
            if i.kind == "batch"
            else named_[i.name].detach()
            for i in program.inputs
        ]
        results = dict(zip(program.outputs, run_whole(program, values), strict=True))
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
        torch.testing.assert_close(results[Output("result", str(program.loss))], loss.detach())
        for name, p in model.named_parameters():
            torch.testing.assert_close(results[Output("gradient", name)], p.grad, msg=name)


def test_ignored_labels() -> None:
    """Labels of -100 keep their meaning where cross-entropy is decomposed."""

    class Labeled(Scalarless):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.linear(x), y, ignore_index=-100)

    model = Labeled()
    x, y = torch.randn(8, 8), torch.tensor([0, 1, -100, 3, 2, -100, 1, 0])
    program = program_of(model, (x, y))
    values = [model.linear.weight.detach(), model.linear.bias.detach(), x, y, torch.ones(())]
    torch.testing.assert_close(run_whole(program, values)[0], model(x, y).detach())


def test_plain_tensor_attributes_are_inputs() -> None:
    class Scaled(Scalarless):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.arange(4.0)
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.linear(x) * self.scale
            return self.last.sum()

    model, x = Scaled(), torch.randn(8, 8)
    model(x)  # leaves a tensor with a history, which copy.deepcopy refuses
    program = program_of(model, (x,))
    assert [i.kind for i in program.inputs] == ["parameter", "parameter", "buffer", "batch", "tangent"]
    values = [model.linear.weight.detach(), model.linear.bias.detach(), model.scale, x, torch.ones(())]
    torch.testing.assert_close(run_whole(program, values)[0], model(x).detach())
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(CaptureError, match=r"meta device .*self\.scale.*register_buffer"):
        capture(model, (x,))


LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)


@pytest.mark.parametrize("loss", LOSSES)
def test_common_losses(loss: Callable[..., torch.Tensor]) -> None:
    """Every loss reaches operators that have a rule."""
    program = program_of(
        Scalarless(), (torch.randn(8, 8),), loss_fn=lambda output, batch: loss(output, batch[0][:, :4])
    )
    assert analyze(program).types


class Upsampled(nn.Linear):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x.repeat_interleave(lengths, 0)).mean()


def test_what_looks_at_lengths_says_what_to_write() -> None:
    with pytest.raises(CaptureError) as error:
        capture(Upsampled(3, 3), (torch.randn(4, 3), torch.full((4,), 6)))
    assert "depends on data at" in str(error.value) and "pass output_size=" in str(error.value)


def test_cached_parametrizations_are_named() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with nn.utils.parametrize.cached(), pytest.raises(CaptureError, match=r"call it outside of cached\(\)"):
        parallelize(layer, None, loss_fn=lambda y, _: y.mean())(torch.ones(2, 2))
