"""The canonical form of a captured graph: what dimension analysis, rules and fingerprints see."""

from __future__ import annotations

from autopar.ir.program import Program
from autopar.passes.canonicalize.attention import canonicalize_attention
from autopar.passes.canonicalize.cross_entropy import fuse_cross_entropy
from autopar.passes.canonicalize.experts import route_experts
from autopar.passes.canonicalize.looked_up_experts import look_up_by_group
from autopar.passes.canonicalize.loops.batch_loops import batch_loops
from autopar.passes.canonicalize.masks import masks_by_function
from autopar.passes.canonicalize.operators import canonicalize
from autopar.passes.canonicalize.reverse_scans import reverse_scans
from autopar.passes.canonicalize.rng import canonicalize_random
from autopar.passes.canonicalize.rows.add_rows import add_rows
from autopar.passes.canonicalize.rows.short_dims import pad_short_dims
from autopar.passes.canonicalize.rows.short_rows import lengthen_rows
from autopar.passes.canonicalize.rows.tables import cut_tables
from autopar.passes.canonicalize.rows.terms import cut_terms
from autopar.passes.canonicalize.rows.windows import merge_windows
from autopar.passes.canonicalize.strides import canonicalize_strides


def canonical(program: Program) -> Program:
    """Bring a program into canonical form; computes the same.

    Strides come first: they are those of the captured graph. What is fused is found in canonical form.
    """
    program = masks_by_function(canonicalize_attention(canonicalize_strides(program)))
    program = cut_terms(batch_loops(canonicalize(canonicalize_random(program))))
    program = reverse_scans(cut_tables(lengthen_rows(merge_windows(program))))
    program = add_rows(look_up_by_group(route_experts(fuse_cross_entropy(program))))
    longer = pad_short_dims(program)
    return program if longer is program else lengthen_rows(merge_windows(longer))
