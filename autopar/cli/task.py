"""`load_task`: the user's model and batch, from the file that ``--model`` names."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class ModelAndBatch(NamedTuple):
    """What FUNCTION returns: a model, an example batch, and what the loss is where that is not clear.

    Attributes:
        model: a `torch.nn.Module`.
        batch: as `autopar.plan` takes it.
        loss_fn: for a model that does not return its loss.
        loss: which scalar of the output is the loss, as for `autopar.parallelize`.
    """

    model: Any
    batch: Any
    loss_fn: Any = None
    loss: Any = None

    @property
    def losses(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"loss_fn": self.loss_fn, "loss": self.loss}


def load_task(spec: str) -> ModelAndBatch:
    """Model and batch from ``FILE.py:FUNCTION``; the file's folder is importable from then on.

    Raises:
        ValueError: there is no such function, it fails, or it returns something else; says where.
        OSError: the file cannot be read.
    """
    # From the right: a Windows path has a colon of its own.
    file, separator, name = spec.rpartition(":")
    if not separator or not file or not name.isidentifier():
        raise ValueError(f"--model {spec!r} is not FILE.py:FUNCTION; write for example model.py:make")
    function = getattr(_import_file(Path(file)), name, None)
    if not callable(function):
        raise ValueError(f"{file} has no function {name!r}; write one that returns (model, batch)")
    with _user_code(spec):
        returned = function()
    # A batch may be a dict, but what is returned is a tuple: (model, batch) or (model, batch, loss).
    if isinstance(returned, Mapping) or not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise ValueError(
            f"{spec} returned {type(returned).__name__}; it must return (model, batch), or add a loss_fn or the name "
            "of the output that is the loss"
        )
    # Imported late: --help does not wait for torch.
    import torch

    if not isinstance(returned[0], torch.nn.Module):
        raise ValueError(f"{spec} returned a {type(returned[0]).__name__} as the model; it must be a torch.nn.Module")
    model, batch, *loss = returned
    from autopar.ir.signature import binding

    try:
        binding.bind(model, batch)
    except TypeError as error:  # Python's own, of a call
        raise ValueError(f"{spec} returned a batch that does not fit its model's forward: {error}") from error
    # A function is loss_fn(output, batch); a name, an index or a path of these says which output is the loss.
    is_named = bool(loss) and loss[0] is not None and not callable(loss[0])
    return ModelAndBatch(model, batch, None, *loss) if is_named else ModelAndBatch(model, batch, *loss)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no file {path}; --model takes FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file; --model takes FILE.py:FUNCTION")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # As when Python runs the file: modules beside it can be imported.
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # or classes of the file cannot be pickled
    with _user_code(str(path)):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Turn an exception in the user's file into one line that says where it was raised."""
    try:
        yield
    except Exception as error:
        # The innermost frame: where the exception was raised, which may be in another file.
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(f"{what} failed at {last.filename}:{last.lineno}: {type(error).__name__}: {error}") from error
