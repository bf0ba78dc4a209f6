"""Files that are no cluster: every fault is an error with the file, the key and a remedy, and nothing hangs."""

from __future__ import annotations

import math
import os
import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.costs.cluster import PRESETS, Cluster
from autopar.costs.mixed.tables import FIGURES, LINK_OPTIONAL
from autopar.costs.read_file import read_text

GROUPS = """name = "two kinds"

[[groups]]
preset = "a100-80gb"
nodes = 2
memory = 40e9
speed = 0.5

[[groups]]
name = "others"
preset = "h100-nvl"
nodes = 1
devices_per_node = 4

[[between]]
groups = ["a100-80gb", "others"]
[between.link]
name = "Ethernet"
bandwidth = 1e10
latency = 1e-5
"""
TEXTS = [Cluster.preset(name).to_toml() for name in PRESETS] + [
    Cluster.preset("h100").to_toml() + '\n[axis_links."tp"]\nname = "PCIe"\nbandwidth = 1e10\nlatency = 1e-5\n',
    GROUPS,
    Cluster.from_toml(GROUPS).to_toml(),
]
VALUES = (
    "nan", "-nan", "inf", "-inf", "-1", "0", "0.0", "-0.0", "1e400", "1e-400", "true", "false", '""', '"x"', "[]", "{}",
    "[[]]", "[1, 2]", "{a = 1}", '["ring"]', "2020-01-01", "12:00:00", "9" * 400, "9" * 5000, "0xff", "1.5", "[nan]",
    '"""\n"""', "'\\u0000'", "[true]", "[-8]", "{float32 = -1}", "[" * 2000, "{a=" * 2000,
)  # fmt: skip
Text = Callable[[random.Random, list[str]], list[str]]


def other_value(draw: random.Random, lines: list[str]) -> list[str]:
    i = draw.choice([i for i, line in enumerate(lines) if " = " in line])
    return [*lines[:i], lines[i].partition(" = ")[0] + " = " + draw.choice(VALUES), *lines[i + 1 :]]


def other_key(draw: random.Random, lines: list[str]) -> list[str]:
    i = draw.choice([i for i, line in enumerate(lines) if " = " in line])
    key = draw.choice(["neighbors", "memory", "x", '"\\n"', "a.b.c", "flops", "name", "device", "links", '""'])
    return [*lines[:i], key + " = " + lines[i].partition(" = ")[2], *lines[i + 1 :]]


def added(draw: random.Random, lines: list[str]) -> list[str]:
    i = draw.randrange(len(lines) + 1)
    line = draw.choice(
        [
            "x = 1",
            "[x]",
            "[[x]]",
            "[[links]]",
            "[device]",
            '[axis_links."x"]',
            "a" + ".a" * 400 + " = 1",
            "\0",
            "\ud7ff",
        ]
    )
    return [*lines[:i], line, *lines[i:]]


def lost(draw: random.Random, lines: list[str]) -> list[str]:
    i = draw.randrange(len(lines))
    return lines[:i] + lines[i + draw.choice([1, 1, 1, 5]) :]


def moved(draw: random.Random, lines: list[str]) -> list[str]:
    order = list(lines)
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    order[i], order[j] = order[j], order[i]
    return order


def damaged(draw: random.Random, lines: list[str]) -> list[str]:
    text = "\n".join(lines)
    i = draw.randrange(len(text))
    wrong = draw.choice(["", "-", "e", "=", "[", '"', "\n", "\x01", "é", "#", ".", "9"])
    return (text[:i] + wrong + text[i + draw.choice([0, 1, 20]) :]).split("\n")


MUTATIONS: tuple[Text, ...] = (other_value, other_value, other_value, other_key, added, lost, moved, damaged)


def figures(cluster: Cluster) -> list[tuple[str, Any]]:
    device = cluster.device
    found = [(key, getattr(device, key)) for key in FIGURES]
    found += [(f"flops.{dtype}", rate) for dtype, rate in device.flops.items()]
    for link in (*cluster.links, *cluster.axis_links.values()):
        found += [(key, getattr(link, key)) for key in ("bandwidth", "latency", *LINK_OPTIONAL)]
        assert link.neighbors == 1
    return found


HANG = 60.0
"""Seconds that no file may take, on however slow a machine; a parser that is quadratic took minutes."""


def check(file: Path, text: str) -> bool:
    """Whether a text is a cluster, which then has valid figures; if not, whether the error is a good one."""
    file.write_text(text, encoding="utf-8")
    start = time.monotonic()
    try:
        cluster = Cluster.load(file)
    except ValueError as e:
        assert type(e) is ValueError, type(e)
        assert str(e).startswith(str(file)), e
        assert re.search(r": .+", str(e)), e
        return False
    finally:
        assert time.monotonic() - start < HANG
    for key, value in figures(cluster):
        least = 0 if key in ("ramp", "host", "host_bandwidth", *LINK_OPTIONAL) else math.ulp(0.0)
        assert type(value) in (int, float) and least <= value < math.inf, (key, value)
    assert all(type(size) is int and size > 0 for size in cluster.group_sizes)
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    return True


def mutate(seed: int, count: int, file: Path) -> tuple[int, int]:
    """How many of so many changed files were clusters, and how many were refused."""
    draw, taken = random.Random(seed), 0
    for _ in range(count):
        lines = draw.choice(TEXTS).split("\n")
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            lines = draw.choice(MUTATIONS)(draw, lines)
        taken += check(file, "\n".join(lines))
    return taken, count - taken


def test_changed_files_are_clusters_or_errors(tmp_path: Path) -> None:
    taken, refused = mutate(0, 150, tmp_path / "cluster.toml")
    # Neither is the rule: comments and orders change nothing.
    assert taken > 5 and refused > 75


@pytest.mark.deep
def test_many_changed_files_are_clusters_or_errors(tmp_path: Path) -> None:
    taken, refused = mutate(1, 2000, tmp_path / "cluster.toml")
    assert taken > 100 and refused > 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a" + ".a" * 50_000 + " = 1", r"characters, 100005 in a line: at most .* Cluster\.save shows the format"),
        ("# \n" * 100_000, r"has 300000 bytes, more than 262144: it is no file of this kind; give another"),
        ("\n".join(["a = [", *["["] * 5000]), r"not valid TOML: nested too deep; Cluster\.save shows the format"),
        ("a = " + "9" * 900, r"unknown key a: remove it"),
        ("", r"missing key name: add it"),
    ],
    ids=["dotted", "huge", "nested", "long number", "empty"],
)
def test_what_would_take_all_time_or_memory_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"cluster\.toml.*" + message):
        Cluster.load(file)
    assert time.monotonic() - start < HANG


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.toml"))
        for name, kind in (("pipe", "pipe"), ("folder", "folder"), ("endless", "device"), ("socket", "socket")):
            with pytest.raises(ValueError, match=rf"{name}\.toml is a {kind}; give a regular file"):
                Cluster.load(tmp_path / f"{name}.toml")


def test_links_are_followed_only_where_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("é")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_text(tmp_path / "link", 100) == "é"
    with pytest.raises(ValueError, match="link is a link; give"):
        read_text(tmp_path / "link", 100, follow=False)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "absent", 100)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory = 80000000000.0", "memory = nan", r"device\.memory must be a positive number, got nan"),
        ("bandwidth = 50000000000.0", "bandwidth = 0", r"links\[1\]\.bandwidth must be a positive number, got 0"),
        ("float64 = 34000000000000.0", 'float64 = "x"', r"device\.flops\.float64 must be a number, and is text"),
        ("units = 132", "units = true", r"device\.units must be an integer, and is bool"),
        ("units = 132", "neighbors = 1", r"unknown key device\.neighbors: remove it"),
        ("latency = 3.4e-06", "latency = 3.4e-06\nneighbors = 8", r"unknown key links\[0\]\.neighbors: remove it"),
        ("group_sizes = [8]", "group_sizes = [true]", r"group_sizes\[0\] must be an integer, and is bool"),
        ("group_sizes = [8]", "axis_links = {x = {}}", r"missing key axis_links\.x\.name: add it"),
        ("group_sizes = [8]", 'axis_links = {"\\n" = 1}', r"axis_links\.\n must be a table, and is an integer"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = Cluster.preset("h100").to_toml()
    assert old in text
    file = tmp_path / "bad.toml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"bad\.toml: " + message):
        Cluster.load(file)
