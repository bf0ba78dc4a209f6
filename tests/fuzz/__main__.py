"""``python -m tests.fuzz``: fuzz, count outcomes, and shrink what fails to small scripts."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.case import BY_NAME, COMPILED, OUTPUT, SIGNATURE, Case, draw, from_json
from tests.fuzz.files.kinds import KINDS
from tests.fuzz.files.run import files
from tests.fuzz.judge import Outcome, plan_of
from tests.fuzz.ranks import RankPool
from tests.fuzz.render import script
from tests.fuzz.shrink import shrunk
from tests.fuzz.workers import Pool

PLAIN = ("in: positional", "out: scalar")
FEATURES = (*BY_NAME, *(f"in: {n}" for n in SIGNATURE), *(f"out: {n}" for n in OUTPUT))


@dataclass
class Tally:
    """Outcomes so far, and what failing cases shrink to."""

    kinds: Counter[str] = field(default_factory=Counter)
    details: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    features: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    known: list[tuple[str, frozenset[str], Case]] = field(default_factory=list)
    hits: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, case: Case, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        self.seconds += outcome.seconds
        if outcome.kind != "equal":
            self.details[outcome.kind][outcome.detail] += 1
        for name in set(case.features):
            self.features[name][outcome.kind] += 1

    def known_as(self, case: Case, outcome: Outcome) -> int | None:
        """Which of the shrunk cases this is likely to be, too."""
        for i, (kind, names, _) in enumerate(self.known):
            if kind == outcome.kind and names <= set(case.features):
                return i
        return None

    def as_dict(self) -> dict[str, object]:
        rows = {n: dict(c) for n, c in sorted(self.features.items(), key=lambda i: -(i[1]["wrong"] + i[1]["crash"]))}
        return {
            "outcomes": dict(self.kinds),
            "seconds of workers": round(self.seconds, 1),
            "details": {k: dict(c.most_common(60)) for k, c in self.details.items()},
            "shrunk": [
                {"kind": k, "features": sorted(n), "cases": self.hits[i]} for i, (k, n, _) in enumerate(self.known)
            ],
            "features": rows,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if options.mode == "files":
        _change_files(options, folder)
        return
    tally, end = Tally(), time.monotonic() + 60 * options.minutes
    pool = RankPool(options.timeout) if options.mode == "ranks" else Pool(options.mode, options.jobs)
    second = pool if isinstance(pool, RankPool) else Pool(options.mode, 1)
    with pool, second:
        for case, outcome in pool.run(_cases(options, end)):
            tally.add(case, outcome)
            _log(case, outcome, folder)
            if outcome.kind in options.shrink:
                _examine(case, outcome, tally, options, second)
            if sum(tally.kinds.values()) % 20 == 0:
                print(time.strftime("%H:%M:%S"), dict(tally.kinds), flush=True)
                (folder / "summary.json").write_text(json.dumps(tally.as_dict(), indent=1))
    (folder / "summary.json").write_text(json.dumps(tally.as_dict(), indent=1))
    print(json.dumps(tally.as_dict(), indent=1) if options.json else _table(tally, options.table))


def _change_files(options: argparse.Namespace, folder: Path) -> None:
    """So many files of each kind; a case of a kind is given by its seed."""
    logging.getLogger("autopar").setLevel(logging.CRITICAL)  # each entry of the cache that is refused is logged
    end = time.monotonic() + 60 * options.minutes
    for kind in options.only or KINDS:
        kinds: Counter[str] = Counter()
        details: Counter[tuple[str, str]] = Counter()
        for seed, outcome in files(kind, range(options.seed, options.seed + options.count), folder):
            kinds[outcome.kind] += 1
            details[outcome.kind, outcome.detail] += 1
            if outcome.kind not in ("equal", "error"):
                print(f"{kind} {seed}: {outcome.kind} {outcome.detail}\n{outcome.text}", flush=True)
            if time.monotonic() > end:
                break
        rows = [{"kind": k, "detail": d, "files": n} for (k, d), n in details.most_common()]
        (folder / f"{kind}.json").write_text(json.dumps(rows, indent=1))
        print(kind, dict(kinds), flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--mode", choices=("one", *COMPILED, "plans", "ranks", "files"), default="one")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--folder", default="/tmp/fuzz", help="for scripts of failing cases and the summary")
    parser.add_argument("--table", type=int, default=0, help="so many cases of each feature alone, as a table")
    parser.add_argument("--only", nargs="*", default=(), help="features of every case; kinds of files")
    parser.add_argument("--avoid", nargs="*", default=(), help="features of no case")
    parser.add_argument("--shrink", nargs="*", default=("wrong", "crash"), help="kinds that are shrunk")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of a case on ranks")
    parser.add_argument("--again", help="an outcomes.jsonl whose cases are run once more, instead of drawn ones")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _cases(options: argparse.Namespace, end: float) -> Iterator[Case]:
    drawn: Iterator[Case]
    if options.again:
        drawn = (from_json(json.loads(line)["case"]) for line in Path(options.again).read_text().splitlines())
    elif options.table:
        drawn = (draw(options.seed + k, options.mode, (name,)) for name in FEATURES for k in range(options.table))
    else:
        drawn = (draw(options.seed + k, options.mode, options.only) for k in range(options.count))
    for case in drawn:
        if time.monotonic() > end:
            return
        if not set(options.avoid) & set(case.features):
            yield case


def _log(case: Case, outcome: Outcome, folder: Path) -> None:
    """Keep what is not equal, a line each."""
    if outcome.kind != "equal":
        line = {**outcome.as_dict(), "text": outcome.text[-1500:], "features": case.features, "case": case.as_json()}
        with (folder / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _examine(case: Case, outcome: Outcome, tally: Tally, options: argparse.Namespace, pool: Pool | RankPool) -> None:
    """Shrink a failing case, unless it holds the features of one that was shrunk before."""
    known = tally.known_as(case, outcome)
    if known is not None:
        tally.hits[known] += 1
        return
    last = [outcome]

    def fails(smaller: Case) -> bool:
        ((_, found),) = pool.run(iter([smaller]))
        same = found.kind == outcome.kind and (found.kind == "wrong" or found.detail == outcome.detail)
        last[:] = [found] if same else last
        return same

    small = shrunk(case, fails)
    names = frozenset(small.features) - set(PLAIN)
    tally.known.append((outcome.kind, names, small))
    tally.hits[len(tally.known) - 1] += 1
    axes, function, seed = plan_of(small)
    values = {"axes": axes, "loss_fn": "lambda out, _: value_of(out)" if function else None, "seed": seed,
              "sizes": tuple(axes.values()), "names": tuple(axes), "ranks": 4}  # fmt: skip
    text = script(small, options.mode, **values)
    path = Path(options.folder) / f"{outcome.kind}-{len(tally.known):03}.py"
    note = "\n".join(f"# {line}" for line in [*sorted(names), *last[0].text.splitlines()[-8:]])
    path.write_text(f"{note}\n{text}")
    print(f"{path}: {outcome.kind} {last[0].detail} {sorted(names)}\n    {last[0].text.splitlines()[-1:]}", flush=True)


def _table(tally: Tally, whole: int) -> str:
    """The summary in lines; of each feature if ``whole``, else of those with a bad outcome."""
    kinds = ("equal", "error", "unclear", "wrong", "crash", "invalid", "ill")
    lines = [" ".join(f"{k} {tally.kinds[k]}" for k in kinds)]
    for kind, counts in tally.details.items():
        lines += [f"  {kind:8}{n:6}  {text}" for text, n in counts.most_common(25)]
    lines += [f"shrunk: {k} {sorted(n)}: {tally.hits[i]} cases" for i, (k, n, _) in enumerate(tally.known)]
    for name, counts in tally.features.items():
        if whole or counts["wrong"] + counts["crash"]:
            lines.append(f"{name:50}" + "  ".join(f"{k} {counts[k]}" for k in kinds if counts[k]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
