"""`SETTINGS`: what is set in torch for the whole process, which a model may ask for, as torch does, or set itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

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
        raise TypeError(f"torch has a {name} always")

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
