"""Tiny networks of timm, diffusers and PEFT, in double precision, with batches and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.real_models.vision_library import import_timm

Tensors = dict[str, torch.Tensor]
ROWS = 4


class Example(NamedTuple):
    """A network, the batch of a step, and what is minimized."""

    model: nn.Module
    batch: Callable[[int], Tensors]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None


def _timm(make: Callable[[Any], nn.Module], size: int = 32) -> Example:
    """Of a network that ``make`` takes from `timm.models`."""
    library = import_timm().models
    torch.manual_seed(0)
    model = make(library)
    _disturb(model)

    def batch(step: int) -> Tensors:
        g = torch.Generator().manual_seed(100 + step)
        return {"x": torch.randn(ROWS, 3, size, size, dtype=torch.float64, generator=g)}

    return Example(model.double().train(), batch, _to_classes)


def _to_classes(output: torch.Tensor, batch: Any) -> torch.Tensor:
    labels = torch.arange(output.shape[0]) % output.shape[-1]
    return functional.cross_entropy(output, labels)


def _disturb(model: nn.Module) -> None:
    """No layer at zero, which would hide what is in front of it, and no random numbers, which eager draws otherwise."""
    g = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):  # of labels, in DiT
            module.dropout_prob = 0.0
    for p in model.parameters():
        with torch.no_grad():
            p.add_(0.02 * torch.randn(p.shape, generator=g))


def _vit(timm: Any) -> nn.Module:
    return timm.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, init_values=0.1, num_classes=8
    )


def _beit(timm: Any) -> nn.Module:
    return timm.Beit(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, init_values=0.1, use_rel_pos_bias=True,
        use_abs_pos_emb=False, num_classes=8,
    )  # fmt: skip


def _swin(timm: Any) -> nn.Module:
    return timm.SwinTransformerV2(
        img_size=32, patch_size=4, window_size=4, embed_dim=16, depths=(2, 1), num_heads=(2, 4), drop_path_rate=0.0,
        num_classes=8,
    )  # fmt: skip


def _maxvit(timm: Any) -> nn.Module:
    inner = timm.maxxvit.MaxxVitTransformerCfg(dim_head=8, rel_pos_type="mlp", rel_pos_dim=16, window_size=(2, 2))
    config = timm.maxxvit.MaxxVitCfg(
        embed_dim=(16, 32), depths=(1, 1), block_type=("M", "M"), stem_width=8, transformer_cfg=inner
    )
    return timm.maxxvit.MaxxVit(config, img_size=(32, 32), num_classes=8)


def _xcit(timm: Any) -> nn.Module:
    return timm.Xcit(img_size=32, patch_size=16, embed_dim=32, depth=2, num_heads=4, cls_attn_layers=1, num_classes=8)


def _mixer(timm: Any) -> nn.Module:
    return timm.MlpMixer(img_size=32, patch_size=8, embed_dim=32, num_blocks=2, num_classes=8)


def _convnext(timm: Any) -> nn.Module:
    return timm.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), use_grn=True, ls_init_value=None, num_classes=8)


def _efficientnet(timm: Any) -> nn.Module:
    blocks = [["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r1_k3_s2_e4_c16_se0.25"], ["ir_r1_k5_s1_e4_c16_se0.25"]]
    arguments = timm._efficientnet_builder.decode_arch_def(blocks)
    return timm.EfficientNet(arguments, stem_size=8, num_features=32, act_layer=nn.SiLU, num_classes=8)


def _resnet(timm: Any) -> nn.Module:
    layers = import_timm().layers
    return timm.ResNet(
        timm.resnet.Bottleneck, (1, 1, 1, 1), channels=(4, 8, 8, 12), stem_width=8, stem_type="deep", avg_down=True,
        aa_layer=layers.BlurPool2d, block_args={"attn_layer": "se"}, num_classes=8,
    )  # fmt: skip


def _resnet_v2(timm: Any) -> nn.Module:
    layers = import_timm().layers
    return timm.ResNetV2(
        layers=(1, 1), channels=(32, 64), stem_chs=16, conv_layer=layers.StdConv2d,
        norm_layer=lambda n, **more: layers.GroupNormAct(n, 4, **more), num_classes=8,
    )  # fmt: skip


def _nfnet(timm: Any) -> nn.Module:
    config = timm.nfnet.NfCfg(
        depths=(1, 1, 1, 1),
        channels=(16, 32, 32, 32),
        stem_chs=16,
        group_size=8,
        attn_layer="se",
        attn_kwargs={},
        skipinit=True,
    )
    return timm.NormFreeNet(config, num_classes=8)


def _diffusers(name: str, batch: Callable[[int], Tensors], **config: Any) -> Example:
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, name)(**config)
    _disturb(model)
    return Example(model.double().train(), batch, _to_noise)


def _to_noise(output: Any, batch: Any) -> torch.Tensor:
    return output.sample.square().mean() + (output.sample * _weights(output.sample)).mean()


def _weights(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).reshape(like.shape)


def _noisy(size: int = 16, channels: int = 4, **more: Callable[[Any], torch.Tensor]) -> Callable[[int], Tensors]:
    def batch(step: int) -> Tensors:
        g = torch.Generator().manual_seed(100 + step)
        tensors = {
            "sample": torch.randn(ROWS, channels, size, size, dtype=torch.float64, generator=g),
            "timestep": torch.randint(1000, (ROWS,), generator=g),
        }
        return tensors | {name: make(g) for name, make in more.items()}

    return batch


def _renamed(batch: Callable[[int], Tensors], **names: str) -> Callable[[int], Tensors]:
    return lambda step: {names.get(k, k): v for k, v in batch(step).items() if names.get(k, k)}


def _normal(*shape: int) -> Callable[[Any], torch.Tensor]:
    return lambda g: torch.randn(*shape, dtype=torch.float64, generator=g)


def _unet2d() -> Example:
    return _diffusers(
        "UNet2DModel", _noisy(), sample_size=16, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(16, 32), norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def _unet2d_condition() -> Example:
    return _diffusers(
        "UNet2DConditionModel", _noisy(encoder_hidden_states=_normal(ROWS, 6, 16)), sample_size=16,
        block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def _dit() -> Example:
    batch = _noisy(8, class_labels=lambda g: torch.randint(10, (ROWS,), generator=g))
    return _diffusers(
        "DiTTransformer2DModel", _renamed(batch, sample="hidden_states"), sample_size=8, patch_size=2, num_layers=2,
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_embeds_ada_norm=10,
        norm_num_groups=4,
    )  # fmt: skip


def _sd3() -> Example:
    batch = _noisy(8, encoder_hidden_states=_normal(ROWS, 6, 16), pooled_projections=_normal(ROWS, 12))
    return _diffusers(
        "SD3Transformer2DModel", _renamed(batch, sample="hidden_states"), sample_size=8, patch_size=2, in_channels=4,
        out_channels=4, num_layers=2, num_attention_heads=4, attention_head_dim=8, joint_attention_dim=16,
        caption_projection_dim=32, pooled_projection_dim=12, pos_embed_max_size=8,
    )  # fmt: skip


def _autoencoder() -> Example:
    return _diffusers(
        "AutoencoderKL", _renamed(_noisy(16, 3), timestep=""), sample_size=16, block_out_channels=(16, 32),
        layers_per_block=1, latent_channels=4, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def _to_next_token(output: Any, batch: Any) -> torch.Tensor:
    """What transformers computes, but in float32."""
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _vq() -> Example:
    """Whose quantizer passes gradients straight through, and learns its code book beside."""
    example = _diffusers(
        "VQModel", _renamed(_noisy(16, 3), timestep=""), block_out_channels=(16, 32), layers_per_block=1,
        latent_channels=4, num_vq_embeddings=16, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return example._replace(loss_fn=lambda output, batch: _to_noise(output, batch) + output.commit_loss.mean())


class _Round(torch.autograd.Function):
    """To a grid in the forward pass, the identity within its range in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: torch.Tensor, levels: int) -> torch.Tensor:
        ctx.save_for_backward(x.abs() < step * levels)
        return (x / step).round().clamp(-levels, levels) * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None


class Quantized(nn.Module):
    """A parametrization of a weight: a few bits of it, row by row."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        step = weight.detach().abs().mean(1, keepdim=True)
        return _Round.apply(weight, step, 3)  # type: ignore[no-any-return]


def _quantized() -> Example:
    """A network whose linear layers compute with rounded weights."""
    example = _timm(_mixer)
    for module in [m for m in example.model.modules() if isinstance(m, nn.Linear)]:
        nn.utils.parametrize.register_parametrization(module, "weight", Quantized())
    return example


class Distilled(nn.Module):
    """A student that learns from labels and from a frozen teacher inside."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher.requires_grad_(False)
        self.student = student
        self.train()

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        scores = self.student(x)
        return _to_classes(scores, None) + towards(scores, wanted)


def towards(scores: torch.Tensor, wanted: torch.Tensor, temperature: float = 2.0) -> torch.Tensor:
    """Distance of a student's distribution from its teacher's."""
    student, teacher = (
        functional.log_softmax(scores / temperature, -1),
        functional.log_softmax(wanted / temperature, -1),
    )
    return functional.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def _distilled() -> Example:
    teacher, student = _timm(_resnet), _timm(_vit)
    return Example(Distilled(teacher.model, student.model).double(), student.batch, None)


def _adapted(**config: Any) -> Example:
    """A language model of transformers whose projections are adapted and the rest of it frozen."""
    import peft
    import transformers

    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, attn_pdrop=0.0,
            resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    adapter = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True,
        task_type="CAUSAL_LM", **config,
    )  # fmt: skip
    model = peft.get_peft_model(base, adapter)
    _disturb(model)

    def batch(step: int) -> Tensors:
        tokens = torch.randint(32, (ROWS, 8), generator=torch.Generator().manual_seed(100 + step))
        return {"input_ids": tokens}

    return Example(model.double().train(), batch, _to_next_token)


SPREAD: Mapping[str, float] = {}
"""How far apart three steps on ranks may be, where that is more than elsewhere."""

EXAMPLES: Mapping[str, Callable[[], Example]] = {
    "timm vit": lambda: _timm(_vit),
    "timm beit": lambda: _timm(_beit),
    "timm swin v2": lambda: _timm(_swin),
    "timm maxvit": lambda: _timm(_maxvit),
    "timm xcit": lambda: _timm(_xcit),
    "timm mixer": lambda: _timm(_mixer),
    "timm convnext v2": lambda: _timm(_convnext),
    "timm efficientnet": lambda: _timm(_efficientnet),
    "timm resnet, blurred": lambda: _timm(_resnet),
    "timm resnet v2": lambda: _timm(_resnet_v2),
    "timm nfnet": lambda: _timm(_nfnet),
    "diffusers UNet2DModel": _unet2d,
    "diffusers UNet2DConditionModel": _unet2d_condition,
    "diffusers DiT": _dit,
    "diffusers SD3": _sd3,
    "diffusers AutoencoderKL": _autoencoder,
    "diffusers VQModel": _vq,
    "quantized weights": _quantized,
    "teacher inside": _distilled,
    "PEFT LoRA": _adapted,
    "PEFT DoRA": lambda: _adapted(use_dora=True),
}  # fmt: skip
