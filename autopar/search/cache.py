"""A cache of plans in files.

A file's name is a hash of everything that a search depends on, autopar's own sources included. So no file is ever
stale: where something has changed, there is no file of that name. Files may be deleted at any time.

A name proves nothing about what is inside. So what is read must be for the same program, cluster, axes, optimizer and
torch, it is costed anew, and its bound is a claim. Whatever is wrong with a file, or with the folder, costs a search
and no more: a cache is there to save time, and who does not know of it should not have to repair it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from autopar.costs.memory import format_bytes
from autopar.costs.read_file import read_text
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.plan.file import MOST_BYTES
from autopar.ir.program import Program
from autopar.rules.rule import Rule
from autopar.search.budget.budget_problem import peak_bytes
from autopar.search.budget.lagrangian import fits
from autopar.search.formulation.pins import require_pinned
from autopar.search.options import Job
from autopar.search.pipeline.space import is_split_for_stages
from autopar.search.recost import differences, recosted
from autopar.sharding.dims import Dims, analyze

logger = logging.getLogger("autopar")

VARIABLE = "AUTOPAR_CACHE"
"""The environment variable that names the folder; empty or 0: there is no cache."""

DEFAULT = "~/.cache/autopar"

MOST_PLANS = 500
"""The most plans in the folder; those that were not used for longest are deleted."""

LEFT_BEHIND = 3600.0
"""Seconds after which a file that is still being written is what a killed process has left."""


def folder() -> Path | None:
    """The folder of the cache; None: there is none."""
    where = os.environ.get(VARIABLE, DEFAULT)
    path = os.path.expanduser(where)
    return None if where in ("", "0") or path.startswith("~") else Path(path)


_asked: ContextVar[list[Path] | None] = ContextVar("autopar_asked_plans", default=None)


@contextlib.contextmanager
def asked_for() -> Iterator[list[Path]]:
    """The files of all plans that are asked for within."""
    files: list[Path] = []
    token = _asked.set(files)
    try:
        yield files
    finally:
        _asked.reset(token)


def file_of(program: Program, dims: Dims, job: Job, kind: str = "") -> Path | None:
    """The file of the plan that a search for all this finds; None where plans are not cached.

    Args:
        program: canonical program; one with repeated layers left out has files of its own.
        dims: its dimension analysis, for the rules of its operators, of which some may be the user's.
        job: what is searched for.
        kind: what else the plan depends on.
    """
    where = folder()
    # A bound that is to be verified is not read from a file.
    if where is None or not job.search.cache or job.search.check or job.search.recipe == "random":
        return None
    if (reason := _distrusted(where)) is not None:
        _warn(reason)
        return None
    repeat = program.repeat and (program.repeat.modules(0), program.repeat.blocks)
    operators = {o: n.target for n, o in dims.operators.items()}  # calls that are alike share one
    rules = sorted({f"{target} {_rule_text(o.rule)}" for o, target in operators.items()})
    parts = (
        _sources(), str(torch.__version__), program.fingerprint, program.loss, repeat, rules, tuple(job.axes.items()),
        job.cluster.to_toml(), job.memory, job.optimizer, job.search, job.restrictions, kind,
    )  # fmt: skip
    file = where / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"
    if (asked := _asked.get()) is not None:
        asked.append(file)
    return file


@cache
def _warn(reason: str) -> None:
    """Once: a table of what-ifs is dozens of searches."""
    logger.warning("plans are not cached: %s; %s=0 turns the cache off", reason, VARIABLE)


def _rule_text(rule: Rule) -> str:
    """A rule without the addresses of functions."""
    return f"{replace(rule, lower={})!r} {list(rule.lower)!r}"


@cache
def _sources() -> str:
    """A hash of all files of the package that a plan may depend on."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path, folders, names in os.walk(root, followlinks=True):
        # In place: os.walk follows this order, so that the hash does not depend on the file system.
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json", ".toml")):
                file = Path(path, name)
                digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _distrusted(where: Path) -> str | None:
    """Why a folder is not used, since others may write to it; None: it is fine, or not there yet."""
    try:
        found = where.stat()
    except FileNotFoundError:
        return None
    except OSError as e:
        return f"the folder {where} cannot be read ({e.strerror}); set {VARIABLE} to another one"
    if not stat.S_ISDIR(found.st_mode):
        return f"{where} is no folder; set {VARIABLE} to one"
    if not hasattr(os, "geteuid"):  # Windows has no such modes
        return None
    if found.st_uid != os.geteuid():
        return f"the folder {where} belongs to user {found.st_uid}, not to {os.geteuid()}; set {VARIABLE} to your own"
    # A group may be the user's own, as it is by default on many systems: everybody is another matter.
    if found.st_mode & stat.S_IWOTH:
        return f"everybody may write to the folder {where}; chmod go-w it, or set {VARIABLE} to another one"
    return None


def load(file: Path, program: Program, job: Job, dims: Dims | None = None) -> Plan | None:
    """The plan of a file, costed anew; None where there is none, or none that can be used, which is logged.

    Args:
        file: from `file_of`.
        program: which the plan must be for.
        job: what is searched for.
        dims: the program's dimension analysis; made if it is needed.
    """
    try:
        text = read_text(file, MOST_BYTES, follow=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        logger.warning("a cached plan cannot be read and is searched again: %s", e)
        return None
    try:
        plan = Plan.from_dict(json.loads(text))
        _require_same(plan, program, job)
        _require_pinned(plan, program, job, dims)
        found = recosted(program, plan, deterministic=job.deterministic)
        if (wrong := next(differences(plan, found), None)) is not None:
            raise PlanError(f"it does not cost what it says: {wrong}")
        if job.memory is not None and not (plan.predicted.peak_bytes and fits(peak_bytes(found), job.memory)):
            raise PlanError(f"its peak of {format_bytes(peak_bytes(found))} is above {format_bytes(job.memory)}")
        # The time of the last use, by which old files are deleted.
        os.utime(file, follow_symlinks=False)
    # Whatever it is: layouts that were never any program's fail anywhere.
    except Exception as e:
        logger.warning("a cached plan cannot be used and is searched again: %s: %s: %s", file, type(e).__name__, e)
        return None
    logger.info("plan of an earlier search, from %s", file)
    return replace(plan, modules=found.modules)


def _require_same(plan: Plan, program: Program, job: Job) -> None:
    """Refuse the plan of another search: a file may have been given another name."""
    # Stages name the link of each axis, which the mesh inside of a stage would not tell.
    cluster = replace(plan.cluster, axis_links=job.cluster.axis_links) if plan.pipeline else plan.cluster
    axes, own = dict(plan.axes), dict(job.axes)
    for what, same in (
        ("program", plan.fingerprint == program.fingerprint),
        ("version of torch", plan.torch == str(torch.__version__)),
        ("cluster", cluster == job.cluster and plan.cluster.link_for(axes) == job.cluster.link_for(axes)),
        ("mesh", plan.axes == tuple(own.items()) or (bool(plan.pipeline) and is_split_for_stages(plan.axes, own))),
        ("optimizer", plan.optimizer == job.optimizer),
        ("precision of messages", plan.quantized == job.quantized),
        ("secondary copy", plan.secondary == job.search.secondary),
    ):
        if not same:
            raise PlanError(f"it is of another {what}")


def _require_pinned(plan: Plan, program: Program, job: Job, dims: Dims | None) -> None:
    """Refuse a plan that is not as the pins say."""
    count = job.search.microbatches
    if count is not None and plan.microbatches != count:
        raise PlanError(f"it is of {plan.microbatches} microbatches, and {count} are asked for")
    pins = job.search.layouts
    # The axis of its stages may be no axis of the mesh.
    if plan.pipeline is None and (pins or job.restrictions.layouts):
        require_pinned(plan, program, dims or analyze(program), pins, job.axes, job.restrictions)


def store(file: Path, plan: Plan) -> None:
    """Write a plan, atomically, so that no process reads half of it; an error is logged."""
    try:
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        # Again: somebody else may have made it meanwhile.
        if (reason := _distrusted(file.parent)) is not None:
            logger.warning("the plan is not cached: %s", reason)
            return
        # In the same folder: os.replace is atomic within one file system only.
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        os.close(handle)
        try:
            plan.save(name)
            os.replace(name, file)
        finally:
            Path(name).unlink(missing_ok=True)
        _prune(file.parent)
    except OSError as e:
        logger.warning("the plan is not cached in %s: %s; set %s to another folder, or to 0", file, e, VARIABLE)


def _prune(where: Path) -> None:
    """Delete what has not been used for longest, and what killed writers have left; others may do the same."""
    known: list[tuple[float, Path]] = []
    for path in (*where.glob("*.json"), *where.glob("*.tmp")):
        with contextlib.suppress(OSError):
            known.append((path.lstat().st_mtime, path))
    plans = sorted(entry for entry in known if entry[1].suffix == ".json")
    left = [entry for entry in known if entry[1].suffix == ".tmp" and entry[0] < time.time() - LEFT_BEHIND]
    for _, path in (*left, *plans[: max(0, len(plans) - MOST_PLANS)]):
        with contextlib.suppress(OSError):
            path.unlink()
