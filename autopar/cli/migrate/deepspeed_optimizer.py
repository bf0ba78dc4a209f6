"""Optimizers of DeepSpeed's configuration, and the ones of `torch.optim` that do the same."""

from __future__ import annotations

from typing import Any

from autopar.cli.migrate.keys import COUNT, FLAG, NUMBER, PAIR, TEXT, Keys
from autopar.cli.migrate.setup import Optimizer

_CLASSES = {
    "adam": ("AdamW", "adamw"), "adamw": ("AdamW", "adamw"), "sgd": ("SGD", "sgd"), "adagrad": ("Adagrad", "adagrad"),
    "onebitadam": ("AdamW", "adamw"), "zerooneadam": ("AdamW", "adamw"),
}  # fmt: skip
"""Optimizers of DeepSpeed, torch's that does the same, and what its state counts as."""

_COMPRESSED = {"onebitadam": "onebit", "zerooneadam": "zeroone", "onebitlamb": ""}
"""Those that send few bits, and the method of `autopar.CompressedGradients`."""

_ARGUMENTS = {
    "lr": NUMBER, "betas": PAIR, "eps": NUMBER, "weight_decay": NUMBER, "momentum": NUMBER, "nesterov": FLAG,
    "amsgrad": FLAG, "dampening": NUMBER, "lr_decay": NUMBER, "initial_accumulator_value": NUMBER,
}  # fmt: skip
_OF_CLASS = {
    "AdamW": "lr betas eps weight_decay amsgrad",
    "Adam": "lr betas eps weight_decay amsgrad",
    "SGD": "lr momentum dampening weight_decay nesterov",
    "Adagrad": "lr lr_decay eps weight_decay initial_accumulator_value",
}
_HOW = ("adam_w_mode", "torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states", "adamw_mode")
PARAMS = "optimizer.params."


def of_optimizer(keys: Keys) -> Optimizer | None:
    """Torch's optimizer that does what DeepSpeed's would."""
    given = keys.read("optimizer.type", TEXT)
    if given is None:
        return None
    kind = given.lower()
    if kind not in _CLASSES:
        lacks = "compresses gradients" if kind in _COMPRESSED else "is none that is translated"
        keys.lack(
            "optimizer.type", f"it {lacks}; pass an optimizer of your own, and optimizer= whose state is as large"
        )
        for key in _params(keys):
            keys.lack(key, "an argument of that optimizer")
        return None
    name, state = _CLASSES[kind]
    # DeepSpeed's "Adam" decays weights as AdamW does unless adam_w_mode is false.
    if kind == "adam" and not keys.read(f"{PARAMS}adam_w_mode", FLAG, True):
        name, state = "Adam", "adam"
    arguments = _arguments(keys, name)
    if name == "SGD" and arguments.get("momentum"):
        state = "sgd-momentum"
    if kind in _COMPRESSED:
        keys.lack("optimizer.type", f"torch.optim.{name} sends whole gradients; {_asked_for(keys, kind)}")
    else:
        keys.translate("optimizer.type", f"torch.optim.{name}; its state counts in the budget")
    _finish(keys, name, kind, arguments)
    left = tuple(a for a in _OF_CLASS[name].split() if keys.is_open(PARAMS + a))
    return Optimizer(name, {a: value for a, value in arguments.items() if a not in left}, state, left)


def _params(keys: Keys) -> list[str]:
    return [key for key in keys if key.startswith(PARAMS)]


def _arguments(keys: Keys, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for argument in _OF_CLASS[name].split():
        value = keys.read(PARAMS + argument, _ARGUMENTS[argument])
        if value is not None:
            found[argument] = tuple(value) if isinstance(value, list) else value
            keys.translate(PARAMS + argument, f"torch.optim.{name}({argument}=...)")
    if name == "AdamW":
        # DeepSpeed's default; torch's is 0.01.
        found.setdefault("weight_decay", 0.01 if keys.read(f"{PARAMS}torch_adam", FLAG, False) else 0.0)
    found.setdefault("lr", 1e-3)
    return found


def _asked_for(keys: Keys, kind: str) -> str:
    """How few bits are asked for here."""
    freeze = keys.read(f"{PARAMS}{'freeze_step' if kind == 'onebitadam' else 'var_freeze_step'}", COUNT, 100_000)
    return (
        "few bits are asked for by hand: give the axis the role compressed, and make "
        f"autopar.CompressedGradients(model, optimizer, method='{_COMPRESSED[kind]}', freeze={freeze}, ...)"
    )


def _finish(keys: Keys, name: str, kind: str, arguments: dict[str, Any]) -> None:
    """Put the other parameters of the optimizer into a list."""
    for key in _params(keys):
        own = key[len(PARAMS) :]
        if own in arguments:
            continue
        if own == "bias_correction" and keys.value(key) is False:
            keys.lack(key, f"torch.optim.{name} corrects the bias of its averages: first steps are others")
        elif own == "max_grad_norm":
            keys.lack(key, "write gradient_clipping, which is clip_grad_norm_ in the loop")
        elif kind in _COMPRESSED and own != "bias_correction":
            keys.lack(key, "an argument of autopar.CompressedGradients, or of none")
        elif own in (*_HOW, "bias_correction") and keys.value(key) not in ("auto", None):
            keys.drop(key, f"torch.optim.{name} is chosen by it, or does it by itself")
        else:
            keys.lack(key, f"torch.optim.{name} has no such argument")
