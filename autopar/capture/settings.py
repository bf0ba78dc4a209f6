"""What is set for the whole process: `SETTINGS`, of torch and numpy, which a model may ask for; functions of libraries.

A script may put others in the place of these: ``F.scaled_dot_product_attention = mine``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

_DETERMINISM = ("default", "warn", "error")
"""Names of torch's modes of deterministic algorithms, by number."""

_CUDA = torch.backends.cuda

_KNOWN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # No number: a call that changes one may only count on.
    "deterministic algorithms": (
        lambda: _DETERMINISM[torch.get_deterministic_debug_mode()],
        torch.set_deterministic_debug_mode,
    ),
    # One object for equal texts: state is compared by identity.
    "float32 matmul precision": (
        lambda: sys.intern(torch.get_float32_matmul_precision()),
        torch.set_float32_matmul_precision,
    ),
    "numpy's errors": (
        lambda: sys.intern(" ".join(map(str, np.geterr().values()))),
        lambda text: np.seterr(**dict(zip(np.geterr(), text.split(), strict=True))),
    ),
    "flash attention": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "memory-efficient attention": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "attention by matmul": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "attention of cuDNN": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
}
"""How each is read and set."""


class _Settings(MutableMapping[str, Any]):
    """The settings as they are now, by name; an assignment sets one."""

    def __getitem__(self, name: str) -> Any:
        return _KNOWN[name][0]()

    def __setitem__(self, name: str, value: Any) -> None:
        _KNOWN[name][1](value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"there is a {name} always")

    def __iter__(self) -> Iterator[str]:
        return iter(_KNOWN)

    def __len__(self) -> int:
        return len(_KNOWN)

    # One object, compared as such: paths to what a call writes begin with it.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """As messages call it."""
        return "torch's settings"


SETTINGS = _Settings()


Names = tuple[Mapping[str, Any], str, tuple[str, ...]]
"""Of a library's module: what it holds, its name, and those of its names that the model's code reads."""


class Libraries:
    """Functions of libraries' modules, and plain values there, by their identity: their code is not looked into.

    Of `torch.nn.functional`, which torch's own modules call, all; of others what the user's code names, and the classes
    of installed modules.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._names: Sequence[Names] = ()
        self._values: list[Any] = []
        self._found: dict[str, Any] = {}

    def now(self, names: Sequence[Names], same: Callable[[Any], Any]) -> Mapping[str, Any]:
        """What is there now, by name; the same object as long as nothing is another one.

        Args:
            names: of modules besides `torch.nn.functional`.
            same: what describes a function or value.
        """
        values = list(vars(functional).values())
        for space, _, own in names:
            # Of lists (`sys.argv`) what is in them: they change in place.
            values += [tuple(v) if type(v) is list else v for v in map(space.get, own)]
        if names is not self._names or not _equal(values, self._values):
            spaces = ((vars(functional), functional.__name__, tuple(vars(functional))), *names)
            found = [f"{label}.{n}" for _, label, own in spaces for n in own]
            self._names, self._values = names, values
            self._found = {n: same(v) for n, v in zip(found, values, strict=True)}
        return self._found


def _equal(a: list[Any], b: list[Any]) -> bool:
    # Python compares identities first: where nothing has been replaced, no object is asked.
    try:
        return a == b
    except Exception:  # an array, say, in the place of a function
        return False
