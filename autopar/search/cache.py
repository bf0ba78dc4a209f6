"""A cache of plans in files.

A file's name is a hash of everything that a search depends on, autopar's own sources included. So no file is ever
stale: where something has changed, there is no file of that name. Files may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.rule import Rule
from autopar.search.options import Job
from autopar.sharding.dims import Dims

logger = logging.getLogger("autopar")

VARIABLE = "AUTOPAR_CACHE"
"""The environment variable that names the folder; empty or 0: there is no cache."""

DEFAULT = "~/.cache/autopar"

MOST_PLANS = 500
"""The most plans in the folder; those that were not used for longest are deleted."""


def folder() -> Path | None:
    """The folder of the cache; None: there is none."""
    where = os.environ.get(VARIABLE, DEFAULT)
    path = os.path.expanduser(where)
    return None if where in ("", "0") or path.startswith("~") else Path(path)


def file_of(program: Program, dims: Dims, job: Job, kind: str = "") -> Path | None:
    """The file of the plan that a search for all this finds; None where plans are not cached.

    Args:
        program: canonical program; one with repeated layers left out has files of its own.
        dims: its dimension analysis, for the rules of its operators, of which some may be the user's.
        job: what is searched for.
        kind: what else the plan depends on.
    """
    where = folder()
    if where is None or not job.search.cache or job.search.recipe == "random":
        return None
    repeat = program.repeat and (program.repeat.path, program.repeat.blocks)
    operators = {o: n.target for n, o in dims.operators.items()}  # calls that are alike share one
    rules = sorted({f"{target} {_rule_text(o.rule)}" for o, target in operators.items()})
    parts = (
        _sources(), str(torch.__version__), program.fingerprint, program.loss, repeat, rules, tuple(job.axes.items()),
        job.cluster.to_toml(), job.memory, job.optimizer, job.search, job.restrictions, kind,
    )  # fmt: skip
    return where / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"


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


def load(file: Path, program: Program) -> Plan | None:
    """The plan of a file; None where there is none, or none that can be read, which is logged."""
    if not file.exists():
        return None
    try:
        plan = Plan.load(file)
        # Written by this user's own search.
        plan = replace(plan, certificate=replace(plan.certificate, claimed=False))
        if plan.fingerprint != program.fingerprint:
            raise PlanError(f"plan file {file} is of another program")
        # The time of the last use, by which old files are deleted.
        os.utime(file)
    except (PlanError, OSError) as e:
        logger.warning("a cached plan cannot be used and is searched again: %s", e)
        return None
    logger.info("plan of an earlier search, from %s", file)
    return plan


def store(file: Path, plan: Plan) -> None:
    """Write a plan, atomically, so that no process reads half of it; an error is logged."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
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
    """Delete what has not been used for longest; another process may do the same."""
    if len(files := list(where.glob("*.json"))) <= MOST_PLANS:
        return
    with contextlib.suppress(FileNotFoundError):
        for old in sorted(files, key=lambda file: file.stat().st_mtime)[:-MOST_PLANS]:
            old.unlink()
