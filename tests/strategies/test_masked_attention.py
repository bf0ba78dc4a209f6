"""Attention under a mask's function: of models as they are, split in every way, and what a window saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of
from autopar.ir.ops.sequence import masked_attention as masked
from autopar.ir.ops.sequence.masked_parts import is_near
from autopar.ir.ops.sequence.send_block import send_block
from autopar.rules.oracle.sharding import check_rule
from autopar.search.options import Search
from autopar.strategies.attention import operators as rules
from autopar.verify.verify import verify

TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
ROWS, TOKENS = 2, 16


class Attending(nn.Module):
    """Attention within a window, or within documents."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.q, self.k, self.v, self.out = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(24, 8)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (h, -1)).transpose(1, 2) for f, h in ((self.q, 4), (self.k, 2), (self.v, 2)))
        at = torch.arange(x.shape[1], device=x.device)
        shown = at[:, None] >= at
        shown = shown & (at[:, None] - at < self.window) if self.window else shown
        if ids is not None and ids.ndim == 1:  # where documents end
            ids = torch.bucketize(at, ids, right=True)[None]
        shown = shown if ids is None else shown & (ids[:, None, :, None] == ids[:, None, None])
        seen = F.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)
        loss: Tensor = self.out(seen.transpose(1, 2).flatten(2)).square().mean()
        return loss


class Learning(nn.Module):
    """Two layers of attention by a formula, with capped scores and biases that are learned by distance (T5).

    It is causal, or padding is hidden by a large number.
    """

    def __init__(self, cap: float | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.bias = nn.ModuleList(nn.Linear(8, 24) for _ in range(2)), nn.Embedding(9, 2)
        self.cap, self.dropout = cap, dropout

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        at = torch.arange(x.shape[1])
        bias = self.bias((at - at[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        if keep is not None:
            bias = bias + (1.0 - keep[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.qkv:
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            scores = q @ k.mT / 2
            scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
            scores = scores + bias
            weights = (torch.where(at <= at[:, None], scores, -torch.inf) if keep is None else scores).softmax(-1)
            x = x + (F.dropout(weights, self.dropout) @ v).transpose(1, 2).flatten(2)
        return x.square().mean()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()


def tokens() -> Tensor:
    return torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def documents() -> dict[str, Tensor]:
    return {"x": numbers(ROWS, TOKENS, 8), "ids": torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [0] * 12 + [1] * 4])}


def padded() -> dict[str, Tensor]:
    """Three tokens of a row are none."""
    keep = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    keep[1, :3] = 0
    return {"input_ids": tokens(), "labels": tokens(), "attention_mask": keep}


def packed() -> dict[str, Tensor]:
    """Documents that transformers finds by their positions, where there is no cache."""
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(TOKENS - n)]) for n in (6, 11)])
    return {"input_ids": tokens(), "labels": tokens(), "position_ids": positions}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    **dict.fromkeys(("window", "learned", "capped", "dropped"), lambda: {"x": numbers(ROWS, TOKENS, 8)}),
    "documents": documents,
    # Of one row three tokens are none, and of the other all.
    "hidden": lambda: {"x": numbers(ROWS, TOKENS, 8), "keep": padded()["attention_mask"] * torch.tensor([[0], [1]])},
    "mistral": padded,
    "qwen": packed,
    "t5": lambda: {"input_ids": tokens(), "labels": tokens()},
    # Of all tokens: -1e10, which hides all keys of a padded query, leaves six digits of its scores.
    "longt5": lambda: {
        "input_ids": tokens(),
        "labels": tokens()[:, :8].contiguous(),
        "attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.int64),
    },
    "swin": lambda: {"pixel_values": numbers(4, 2, 16, 16), "labels": torch.arange(4)},
}


LEARNING: dict[str, tuple[Any, ...]] = {
    "learned": (None,), "capped": (1.5,), "dropped": (None, 0.5), "hidden": (None,),
}  # fmt: skip
"""A cap, and dropout."""


def build(name: str) -> nn.Module:
    """A model: of transformers a sliding window, packed documents, learned biases, and shifted windows of an image."""
    torch.manual_seed(0)
    if name in ("window", "documents"):
        return Attending(3 if name == "window" else 0).double()
    if name in LEARNING:
        return Learning(*LEARNING[name]).double()
    hf: Any = pytest.importorskip("transformers")
    made: Any = {
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(sliding_window=4, **TINY)),
        "qwen": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(use_cache=False, **TINY)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0,
                        use_cache=False, decoder_start_token_id=0)),
        "longt5": lambda: hf.LongT5ForConditionalGeneration(
            hf.LongT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
                            use_cache=False, decoder_start_token_id=0, encoder_attention_type="transient-global",
                            local_radius=3, global_block_size=4)),
        "swin": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=16, patch_size=2, num_channels=2, embed_dim=8, depths=[2], num_heads=[2],
                          window_size=4, num_labels=4, drop_path_rate=0.0)),
    }  # fmt: skip
    model: nn.Module = made[name]().double()
    if name == "longt5":  # whose own norms are float32's
        for module in list(model.modules()):
            for child in [n for n, m in module.named_children() if type(m).__name__ == "LongT5LayerNorm"]:
                setattr(module, child, nn.RMSNorm(32, 1e-6).double())
    return model


@pytest.mark.deep
@pytest.mark.parametrize("name", ["mistral", "qwen", "t5", "longt5", "swin"])
@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}], ids=len)
def test_models_of_transformers(name: str, axes: dict[str, int]) -> None:
    """Loss and gradients of random plans are eager's."""
    model, given = build(name), BATCHES[name]()
    for seed in range(2):
        report = verify(model, given, axes, plan="random", seed=seed)
        assert max(report.max_error, report.capture_error) < 1e-10
    has = any(n.target is masked.attention_masked for n in program_of(model, given).graph.graph.nodes)
    assert has == (name in ("mistral", "qwen", "t5", "longt5"))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "parts", "sends"),
    [
        ("window", 4, 1),
        ("documents", 2, 2),
        ("learned", 2, 2),
        ("capped", 4, 3),
        ("hidden", 4, 3),
        pytest.param("documents", 4, 8, marks=pytest.mark.deep),
    ],
)
def test_keys_of_neighbors_or_of_all(name: str, parts: int, sends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window takes rows of one neighbor; documents take keys in a ring, with numbers of documents."""
    monkeypatch.setattr(rules, "blocked", lambda *_: "bhgqkde")
    model, given = build(name), BATCHES[name]()
    asked = plan(model, given, cluster="h100", axes={"a": parts}, search=Search(roles={"a": "context"}, cache=False))
    report = verify(model, given, {"a": parts}, plan=asked)
    assert report.max_error < 1e-10
    nodes = list(report.program.graph.graph.nodes)
    assert sum(n.target is send_block for n in nodes) >= 2 * sends
    # Nobody has a tensor of all queries, or of queries times keys.
    shapes = [n.meta["val"].shape for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not [s for s in shapes if len(s) == 4 and s[2] * s[3] >= TOKENS * TOKENS // parts]


@pytest.mark.parametrize(
    "window", [2, pytest.param(5, marks=pytest.mark.deep), pytest.param(9, marks=pytest.mark.deep)]
)
def test_halos_of_several_devices(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that reaches one device, or two, to both sides, on kernels of few rows, is what the whole is."""
    monkeypatch.setattr(masked, "FEWEST", 2)
    q, k, v, grad = (numbers(1, h, 24, n) for h, n in ((2, 4), (1, 4), (1, 6), (2, 6)))
    mask = ("", False, window, 1, 0, 0, 24, None)
    assert is_near(window, 1, 4, 6) == (window < 13)
    out, log = masked.attention_masked(q, k, v, [], *mask)
    for target, args in (
        (masked.attention_masked, (q, k, v, [], *mask)),
        (masked.attention_masked_backward, (grad, q, k, v, [], out, log, *mask)),
    ):
        assert any("qk" in text for text in check_rule(target, args, {}, parts=6, pairs=False))


@pytest.mark.parametrize("parts", [2, 4])
def test_a_device_has_two_keys_at_least(parts: int) -> None:
    """Of one that had one key, leaves that have keys and leaves that have queries would look alike."""
    q, k, v, grad = (numbers(1, 1, 4, 4) for _ in range(4))
    ids = torch.tensor([0, 0, 1, 1])
    leaves, mask = [ids[None, None, :, None], ids[None, None, None]], ('[["aten.eq.Tensor", "%0", "%1"]]', False, 4, 4)
    out, log = masked.attention_masked(q, k, v, leaves, *mask, 0, 0, 4, None)
    for target, args in (
        (masked.attention_masked, (q, k, v, leaves, *mask, 0, 0, 4, None)),
        (masked.attention_masked_backward, (grad, q, k, v, leaves, out, log, *mask, 0, 0, 4, None)),
    ):
        assert any("qk" in text for text in check_rule(target, args, {}, parts=parts, pairs=False)) == (parts == 2)


@pytest.mark.parametrize("hides", [masked.ROWS, masked.PLACES])
def test_rows_that_large_numbers_hide_go_round(hides: str) -> None:
    """Of one sample some keys are hidden, of the other one all; in a ring and as halos, with a learned table."""
    least = torch.finfo(torch.float64).min
    q, k, v, grad, table = (
        numbers(*shape) for shape in ((2, 4, 8, 4), (2, 2, 8, 4), (2, 2, 8, 6), (2, 4, 8, 6), (15, 4))
    )
    bias = torch.zeros(2, 1, 1, 8).double()
    bias[0, ..., :3], bias[1] = least, least
    places = [torch.arange(8).view(1, 1, 8, 1), torch.arange(8).view(1, 1, 1, 8)]
    formula = (
        '[["aten.sub.Tensor", "%0", "%1"], ["aten.add.Tensor", "%4", 7], ["autopar.look_up.default", "%3", "%5"], '
        '["aten.add.Tensor", "%6", "%2"]]'
    )
    for before, after in ((8, 8), (8, 0), (1, 0)):
        mask = (formula, True, before, after, 0, 0, 8, 0.7, table, None, hides)
        saved = masked.attention_masked(q, k, v, [*places, bias], *mask)
        for target, args in (
            (masked.attention_masked, (q, k, v, [*places, bias], *mask)),
            (masked.attention_masked_backward, (grad, q, k, v, [*places, bias], *saved, *mask, True)),
        ):
            assert any("qk" in text for text in check_rule(target, args, {}, parts=4, pairs=False))


@pytest.mark.parametrize(("before", "after"), [(4, 0), (3, 5), (64, 0), (0, 64), (64, 64), (-2, 9)])
def test_no_more_is_computed_than_priced(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of rows have all keys that the window shows, and of a device's part few that it hides."""
    monkeypatch.setattr(masked, "FEWEST", 2)
    positions = 64
    at, of = torch.arange(positions)[:, None], torch.arange(positions)
    shown = (of >= at - before) & (of <= at + after)
    for parts in (1, 4):
        size, most = positions // parts, 0
        for index in range(parts):
            ends = list(masked.bands(size, positions, before, after, index * size, 0, positions))
            computed = torch.zeros(size, positions, dtype=torch.bool)
            for start, end, low, high in ends:
                computed[start:end, low:high] = True
            own = shown[index * size : (index + 1) * size]
            assert bool((computed | ~own).all())
            most = max(most, int(computed.sum()))
        priced = masked.pairs(size, positions, before, after, positions)
        assert most <= priced <= 2 * most
