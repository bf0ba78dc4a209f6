"""`decide_for_training`: layouts of a run that evaluates before its first step are those of the step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from autopar.errors import RankError
from autopar.ir.layout import Split
from autopar.ir.plan import Plan
from autopar.runtime.state.optimizer_layouts import optimizers_of_model

if TYPE_CHECKING:
    from autopar.module.session import Session
    from autopar.specialize import Request

logger = logging.getLogger("autopar")


def decide_for_training(session: Session, request: Request) -> None:
    """Plan the training step of the first call's batch, if that call evaluates and an optimizer has the parameters.

    The first call decides the layouts of the parameters. Those that are best where there is neither a backward pass nor
    optimizer state may be slow for training, or not fit at all. A plan decides already; but a layout of its own may be
    of a factor that a dim has in training alone. A collective call.
    """
    model, plan = session.original, session.options.plan
    if session.first is not None or session.options.inputs == "local" or torch.is_grad_enabled():
        return  # rows of each rank need a plan, or an example of the batch
    if not optimizers_of_model(model) if plan is None else not _is_of_factors(plan):
        return
    try:
        with torch.inference_mode(False), torch.enable_grad(), _training(model):
            session.specialize_request(request)
    except RankError:
        raise
    except Exception as e:
        # The model's own errors, too: without labels, for one. The call at hand can be made all the same.
        logger.info("an evaluation decides the layouts, as its batch cannot be planned for training: %s", e)
    session.slots.inventory()  # its modes are those of before


def _is_of_factors(plan: Plan) -> bool:
    """Whether a parameter is split along a factor of a dim that has several."""
    return any(isinstance(p, Split) and p.factor > 0 for layout in plan.parameters.values() for p in layout)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """A model that is evaluated, as it is when it is trained; afterwards each module is in its mode of before."""
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
