"""When the garbage collector of a process of tests runs: between tests, and only over what is new."""

import gc

YOUNG = 300_000
"""Objects made since the last collection that make another one worth its time."""


def freeze() -> None:
    """Whatever lives now stays, and no later collection looks at it: modules, and what tests share."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_now_and_then() -> None:
    """Collect, if much was made since the last time. To call between tests, when what lives is what they share."""
    if gc.get_count()[0] > YOUNG:
        freeze()
