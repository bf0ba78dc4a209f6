"""What every program of the fuzzer begins with: inputs, and a record of all that a training loop can see."""

import array
import collections
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import os
import random
import threading
import time
import types
import uuid
import weakref

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "F",
    "array",
    "checkpoint",
    "collections",
    "contextlib",
    "contextvars",
    "copy",
    "enum",
    "functools",
    "itertools",
    "nn",
    "os",
    "threading",
    "time",
    "types",
    "uuid",
    "weakref",
]  # for what follows
torch.set_num_threads(1)


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def randn(number, *shape):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def leaves(value, path=""):
    """Every tensor and constant in a value with its path; containers count by the name of their type."""
    if isinstance(value, torch.Tensor):
        yield path, value.full_tensor() if hasattr(value, "full_tensor") else value
    elif dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace) or hasattr(value, "__dict__"):
        yield path + ":type", type(value).__name__
        for name, inner in vars(value).items():
            yield from leaves(inner, f"{path}.{name}")
    elif isinstance(value, dict):
        yield path + ":type", type(value).__name__
        for name, inner in value.items():
            yield from leaves(inner, f"{path}[{name!r}]")
    elif isinstance(value, list | tuple):
        yield path + ":type", f"{type(value).__name__} of {len(value)}"
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{i}]")
    else:
        yield path, value


def tensors_of(value):
    return [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def put(log, tag, value):
    for path, leaf in leaves(value):
        log[tag + path] = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def attribute(model, path):
    for name in path.split("."):
        model = getattr(model, name)
    return model


def record(log, tag, model, out, loss, python=()):
    """Output, loss, gradients, buffers and Python state as they are now."""
    put(log, f"{tag}: output", out)
    put(log, f"{tag}: loss", loss)
    record_state(log, tag, model)
    for name in python:
        put(log, f"{tag}: attribute {name}", attribute(model, name))


def record_state(log, tag, model):
    if hasattr(model, "full_gradients"):
        state, gradients = model.full_state_dict(), model.full_gradients()
    else:
        state = model.state_dict()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, value in {**dict(model.named_buffers(remove_duplicate=False)), **state}.items():
        put(log, f"{tag}: state {name}", value)
    for name, value in gradients.items():
        put(log, f"{tag}: gradient {name}", value.to_dense() if value.is_sparse else value)


def differences(expected, found, bound=1e-9):
    """What differs between two records, the first difference first."""
    wrong = []
    for key in [*expected, *(k for k in found if k not in expected)]:
        if key not in found or key not in expected:
            wrong.append(f"{key}: only in {'eager' if key in expected else 'autopar'}")
            continue
        a, b = expected[key], found[key]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            same = type(a) is type(b) and (a == b or a is b or (callable(a) and callable(b)) or close(a, b))
            wrong += [] if same else [f"{key}: eager {a!r}, autopar {b!r}"]
        elif a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{key}: eager {a.dtype} {list(a.shape)}, autopar {b.dtype} {list(b.shape)}")
        elif a.numel() and not torch.allclose(a, b, rtol=bound, atol=bound * scale(a), equal_nan=True):
            wrong.append(f"{key}: differs by {float((a - b).abs().max()) if a.dtype != torch.bool else 1:.2g}, "
                         f"eager {a.flatten()[:4].tolist()}, autopar {b.flatten()[:4].tolist()}")  # fmt: skip
    return wrong


def close(a, b):
    return isinstance(a, float) and (abs(a - b) <= 1e-9 * max(1.0, abs(a)) or (a != a and b != b))


def scale(tensor):
    values = (tensor if tensor.is_complex() else tensor.double()).abs()
    values = values[torch.isfinite(values)]
    return max(1.0, float(values.max())) if values.numel() else 1.0
