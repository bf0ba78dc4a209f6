"""Which parameters, or gradients, of a pass are sent in one message, as `bucket_collectives` fills its buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.passes.collectives.bucket_collectives import filled


class Unit(NamedTuple):
    """What is always sent together.

    Attributes:
        bytes: of all its parameters.
        members: how many these are.
    """

    bytes: float
    members: float = 1.0


@dataclass
class Sent:
    """How what each region gathers, or reduces, in a pass is sent along an axis.

    Attributes:
        messages: by region, messages for each of its parameters.
        beside: by region, the regions beside whose kernels parts of its bytes are sent.
        shown: by region, the same of the part behind which the pass has nothing that hides it.
        most: by region, its largest part that is in one bucket.
    """

    messages: dict[str, float] = field(default_factory=dict)
    beside: dict[str, dict[str, float]] = field(default_factory=dict)
    shown: dict[str, dict[str, float]] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)

    def __or__(self, other: Sent) -> Sent:
        """Both, of other regions."""
        return Sent(
            self.messages | other.messages, self.beside | other.beside, self.shown | other.shown, self.most | other.most
        )


def sent_in_buckets(
    units: Mapping[str, Sequence[Unit]],
    limit: float,
    ends: tuple[str, str],
    *,
    apart: int | None = None,
    late: bool = False,
    first_is_sent: bool = False,
) -> Sent:
    """The messages of a pass.

    A bucket is sent beside the region of its first unit. The first one of all has nothing that hides it, if it is of
    the region that the pass begins with; the first unit of the next region is sent beside that one. Of gradients, which
    are sent when the last one of a bucket is known, the same is true with time reversed.

    Plans may leave any of these whole. Where it is not known that the pass begins with one, the others in its bucket
    are counted as sent beside its region, where kernels may hide them.

    Args:
        units: of each region, in the order of the pass.
        limit: bytes of a bucket.
        ends: the region that the pass begins with, and the next one; of gradients the last one, and the one before.
        apart: blocks that a graph of a stage has: a bucket has no more.
        late: whether they are gradients.
        first_is_sent: whether a unit of the region that the pass begins with is.
    """
    buckets = list(_buckets([(region, unit) for region, own in units.items() for unit in own], limit, apart))
    if late:
        buckets = [bucket[::-1] for bucket in reversed(buckets)]
    found, (first, second), begun = Sent(), ends, set[str]()
    size = {region: sum(unit.bytes for unit in own) for region, own in units.items()}
    parameters = {region: sum(unit.members for unit in own) for region, own in units.items()}
    for name, every in units.items():
        if not every:  # what else is sent there, such as buffers, is on its own
            found.beside[name], found.shown[name] = {name: 1.0}, {name: float(name == first)}
    for i, bucket in enumerate(buckets):
        region = bucket[0][0]
        home = first if region == second and region not in begun else region
        parts: dict[str, float] = defaultdict(float)
        for name, unit in bucket:
            parts[name] += unit.bytes / size[name]
        begun.update(parts)
        each = 1 / sum(unit.members for _, unit in bucket)
        for name, unit in bucket:
            found.messages[name] = found.messages.get(name, 0.0) + each * unit.members / parameters[name]
        for name, part in parts.items():
            found.most[name] = max(found.most.get(name, 0.0), part)
            exposed = i == 0 and region == first and (first_is_sent or name == first)
            for into in (found.beside, found.shown) if exposed else (found.beside,):
                own = into.setdefault(name, {})
                own[home] = own.get(home, 0.0) + part
    return found


def _buckets(
    ordered: Sequence[tuple[str, Unit]], limit: float, apart: int | None
) -> Iterator[Sequence[tuple[str, Unit]]]:
    at = 0
    for count in filled([unit.bytes for _, unit in ordered], limit):
        for start in range(at, at + count, apart or count):
            yield ordered[start : min(start + (apart or count), at + count)]
        at += count
