import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.cluster import FLOAT_DTYPES, PRESETS, Cluster, Device, Link
from autopar.costs.collectives import COLLECTIVES
from autopar.costs.device import KINDS
from autopar.costs.mixed.figures import pooled_link, slowest_link

H100 = Cluster.preset("h100")
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1)
LINKS = st.builds(Link, NAMES, POSITIVE, POSITIVE)
DEVICES = st.builds(
    Device,
    NAMES,
    st.dictionaries(st.sampled_from(FLOAT_DTYPES), POSITIVE, min_size=1),
    POSITIVE,
    POSITIVE,
    POSITIVE,
    st.floats(min_value=0, max_value=1, exclude_min=True),
    st.integers(1, 1 << 20),
    st.floats(min_value=0, allow_infinity=False, allow_nan=False),
    st.floats(min_value=0, max_value=1, exclude_min=True),
    st.floats(min_value=0, allow_infinity=False, allow_nan=False),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    sizes, size = [], 1
    for factor in draw(st.lists(st.integers(1, 8), max_size=3)):
        size *= factor
        sizes.append(size)
    links = draw(st.lists(LINKS, min_size=len(sizes) + 1, max_size=len(sizes) + 1))
    return Cluster(
        draw(NAMES), draw(DEVICES), tuple(links), tuple(sizes), draw(st.dictionaries(NAMES, LINKS, max_size=3))
    )


def link_names(cluster: Cluster, **axes: int) -> list[str]:
    return [link.name for link in cluster.link_for(axes)]


NEAR, FAR = "NVLink 4", "InfiniBand NDR"


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"node": 32, "gpu": 8}, [FAR, NEAR]),
        ({"gpu": 8}, [NEAR]),
        ({"data": 4, "model": 2}, [NEAR, NEAR]),
        ({"data": 2, "fsdp": 4, "model": 2}, [FAR, NEAR, NEAR]),
        ({"all": 16}, [FAR]),
        ({"data": 2, "model": 16}, [FAR, FAR]),
        ({"data": 3, "model": 2}, [FAR, NEAR]),  # 6 devices fit into a node of 8, but do not divide it
        ({"odd": 3}, [FAR]),
        ({"data": 8, "unused": 1}, [NEAR, NEAR]),
        ({}, []),
    ],
)
def test_an_axis_uses_the_innermost_link_that_holds_it(axes: dict[str, int], expected: list[str]) -> None:
    assert link_names(H100, **axes) == expected


@pytest.mark.parametrize(
    ("axes", "cards"),
    [
        ({"all": 16}, 8),  # a ring through all devices of two nodes leaves each node once, over all cards
        ({"data": 2, "model": 16}, (1, 8)),
        ({"node": 4, "gpu": 8}, (1, None)),
        ({"data": 8, "model": 4}, (2, None)),  # two of each group of eight lie in one node
        ({"odd": 3}, 1),
        ({"odd": 12}, 4),
    ],
)
def test_neighbors_in_a_node_share_their_cards(axes: dict[str, int], cards: int | tuple[int | None, ...]) -> None:
    counts = cards if isinstance(cards, tuple) else (cards,)
    near, far = (link.bandwidth for link in H100.links)
    expected = [near if count is None else min(near, count * far) for count in counts]
    assert [link.bandwidth for link in H100.link_for(axes)] == expected


def test_a_ring_through_neighbors_leaves_the_node_once() -> None:
    near, far = (link.latency for link in H100.links)
    (data,) = H100.link_for({"data": 32})
    assert data.latency == pytest.approx(near * 7 / 8 + far / 8)
    assert (data.algorithms, data.neighbors) == (("ring", "tree"), 8)
    node, gpu = H100.link_for({"node": 4, "gpu": 8})
    assert (node.latency, gpu.latency) == (far, near)
    assert (node.algorithms, node.neighbors) == (("ring", "tree", "pat"), 1)
    pod = replace(H100, links=(*H100.links, Link("spine", 1e9, 1e-3)), group_sizes=(8, 256))
    (every,) = pod.link_for({"all": 1024})
    assert every.latency == pytest.approx(near * 7 / 8 + far * (1 / 8 - 1 / 256) + 1e-3 / 256)


def test_a_ring_is_as_fast_as_the_slowest_level_that_it_crosses() -> None:
    near, far = (link.bandwidth for link in H100.links)
    pod = replace(H100, links=(*H100.links, Link("spine", 1e9, 1e-3)), group_sizes=(8, 256))
    (every,), (few, _) = pod.link_for({"all": 1024}), pod.link_for({"few": 1024, "inner": 8})
    assert every.bandwidth == min(near, 8 * far, 256e9)
    assert few.bandwidth == min(far, 32e9)


def test_a_collective_takes_as_many_times_as_long_as_its_link_says() -> None:
    near, far = H100.links
    gloo = replace(near, factors={"reduce_scatter": 2.0, "all_reduce": 0.75})
    for kind in KINDS:
        of_form = float(COLLECTIVES[kind](1e6, 8, near))
        assert float(COLLECTIVES[kind](1e6, 8, gloo)) == pytest.approx(gloo.factors.get(kind, 1.0) * of_form)
    there = replace(H100, links=(gloo, far))
    assert "factors" not in H100.to_toml() and Cluster.from_toml(there.to_toml()) == there
    with pytest.raises(ValueError, match=r"links\[0\].factors has 'all_gather_v': did you mean 'all_gather'"):
        Cluster.from_toml(there.to_toml().replace("all_reduce =", "all_gather_v ="))
    # Of several links, what is no better than any, and what is no worse.
    assert slowest_link([near, gloo]).factors == {"reduce_scatter": 2.0, "all_reduce": 1.0}
    assert pooled_link([near, gloo], [1.0, 1.0]).factors == {"reduce_scatter": 1.0, "all_reduce": 0.75}


def test_groups_that_share_cards_get_in_each_others_way() -> None:
    near, far = H100.links
    crowded = replace(H100, links=(near, replace(far, contention=0.5)))
    cases = {1: 8 * far.bandwidth, 2: 4 * far.bandwidth / 2**0.5, 4: 2 * far.bandwidth / 2, 8: far.bandwidth}
    for inner, expected in cases.items():  # as many groups share a node; those with one device there have its card
        data, _ = crowded.link_for({"data": 16, "inner": inner})
        assert data.bandwidth == pytest.approx(min(near.bandwidth, expected))
    (within,) = crowded.link_for({"gpu": 8})
    assert within == near
    assert "contention" not in H100.to_toml() and Cluster.from_toml(crowded.to_toml()) == crowded


def test_groups_of_other_nodes_get_in_their_way_too() -> None:
    """A card's time for the bytes, over the groups of a node, for each stage but the first; not if rails are apart."""
    near, far = H100.links
    crowded = replace(H100, links=(near, replace(far, contention=0.5)))
    for inner, groups in ((1, 1), (2, 2), (4, 4), (8, 1)):
        one, three = (crowded.link_for({"stage": s, "data": 16, "inner": inner})[1] for s in (1, 3))
        added = 0.5 * 2 / groups / far.bandwidth if groups > 1 else 0.0
        assert 1 / three.bandwidth == pytest.approx(1 / one.bandwidth + added)
    assert H100.link_for({"stage": 3, "data": 16, "inner": 2})[1] == H100.link_for({"data": 16, "inner": 2})[0]


@pytest.mark.parametrize("algorithms", [("bruck",), (), "ring"])
def test_unknown_algorithms_are_named(algorithms: object) -> None:
    with pytest.raises(ValueError, match="algorithms"):
        Link("link", 1.0, 1.0, algorithms)  # type: ignore[arg-type]


def test_three_levels() -> None:
    pod = replace(H100, links=(*H100.links, Link("spine", 1e9, 1e-5)), group_sizes=(8, 256))
    assert link_names(pod, pods=4, node=32, gpu=8) == ["spine", FAR, NEAR]


def test_the_name_of_an_axis_comes_before_its_size() -> None:
    slow = Link("PCIe", 1e10, 1e-5)
    cluster = replace(H100, axis_links={"tensor": slow, "absent": slow})
    assert link_names(cluster, data=4, tensor=2) == [NEAR, "PCIe"]


@pytest.mark.parametrize("size", [0, -2, 2.0, True])
def test_a_wrong_axis_size_is_named(size: object) -> None:
    with pytest.raises(ValueError, match=r"mesh axis 'gpu' has size .* positive integer"):
        H100.link_for({"node": 2, "gpu": size})  # type: ignore[dict-item]


def test_presets_state_the_datasheets() -> None:
    a100, h100, h200, cpu = (Cluster.preset(name) for name in ("a100-80gb", "h100", "h200", "cpu"))
    assert (a100.device.peak("bfloat16"), a100.device.peak("float32"), a100.device.peak("float64")) == (
        312e12,
        19.5e12,
        9.7e12,
    )
    assert (a100.device.memory, a100.device.bandwidth) == (80e9, 2039e9)
    assert [link.bandwidth for link in a100.links] == [300e9, 25e9]
    assert (h100.device.peak("float16"), h100.device.memory, h100.device.bandwidth) == (989e12, 80e9, 3.35e12)
    assert [link.bandwidth for link in h100.links] == [450e9, 50e9]
    assert h200.device.flops == h100.device.flops
    assert (h200.device.memory, h200.device.bandwidth) == (141e9, 4.8e12)
    assert (cpu.device.memory, len(cpu.links)) == (4 * 2**30, 1)
    b200, mi300x, l4, a100_40 = (Cluster.preset(name).device for name in ("b200", "mi300x", "l4", "a100-40gb"))
    assert (b200.peak("bfloat16"), b200.memory, b200.bandwidth) == (2250e12, 180e9, 7.7e12)
    assert (mi300x.peak("bfloat16"), mi300x.memory, mi300x.bandwidth) == (1307.4e12, 192e9, 5.3e12)
    assert (l4.peak("bfloat16"), l4.memory, l4.bandwidth) == (121e12, 24e9, 300e9)
    assert (a100_40.flops, a100_40.memory, a100_40.bandwidth) == (a100.device.flops, 40e9, 1555e9)
    pcie = (Cluster.preset(name).device for name in ("a100-40gb-pcie", "a100-80gb-pcie", "h100-pcie", "h100-nvl"))
    assert [(d.peak("bfloat16"), d.memory, d.bandwidth) for d in pcie] == [
        (312e12, 40e9, 1555e9),
        (312e12, 80e9, 1935e9),
        (756e12, 80e9, 2e12),
        (835e12, 94e9, 3.9e12),
    ]
    assert len(PRESETS) == 12


@pytest.mark.parametrize("name", PRESETS)
def test_nearer_links_are_better(name: str) -> None:
    links = Cluster.preset(name).links
    assert all(a.bandwidth > b.bandwidth and a.latency < b.latency for a, b in pairwise(links))


def test_peak_of_a_dtype() -> None:
    device = Device("toy", {"float32": 10.0, "float64": 5.0}, 1.0, 1.0, 1.0)
    assert (device.peak("float32"), device.peak("int64"), device.peak("bool")) == (10.0, 10.0, 10.0)
    assert device.peak("complex128") == 5.0
    with pytest.raises(ValueError, match=r"device toy states no peak for bfloat16 \(only float64, float32\); add it"):
        device.peak("bfloat16")


def test_values_are_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        H100.device.memory = 1.0  # type: ignore[misc]
    assert len({H100, replace(H100), Cluster.preset("h200")}) == 2


def test_changing_the_arguments_afterwards_changes_nothing() -> None:
    flops, overrides = {"float32": 1.0}, {"tensor": H100.links[0]}
    device = Device("toy", flops, 1.0, 1.0, 1.0)
    cluster = Cluster("toy", device, H100.links[:1], (), overrides)
    flops["float32"] = 2.0
    overrides.clear()
    assert device.peak("float32") == 1.0
    assert list(cluster.axis_links) == ["tensor"]


@given(clusters())
def test_toml_reads_back_as_an_equal_cluster(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster.toml"
    cluster.save(path)
    read = Cluster.load(path)
    assert read == cluster
    assert read.fingerprint() == cluster.fingerprint()
    assert pickle.loads(pickle.dumps(cluster)) == cluster


def test_fingerprint_tells_clusters_apart() -> None:
    changed = [
        replace(H100, name="other"),
        replace(H100, group_sizes=(4,)),
        replace(H100, axis_links={"tensor": H100.links[0]}),
        replace(H100, device=replace(H100.device, memory=79e9)),
        replace(H100, device=replace(H100.device, flops={"float32": 1.0})),
        replace(H100, links=(H100.links[0], replace(H100.links[1], latency=1e-5))),
    ]
    assert len({cluster.fingerprint() for cluster in [H100, *changed]}) == len(changed) + 1


@pytest.mark.deep
def test_fingerprint_does_not_depend_on_order_or_process() -> None:
    shuffled = replace(
        H100,
        device=replace(H100.device, flops=dict(reversed(H100.device.flops.items()))),
        axis_links={"b": H100.links[0], "a": H100.links[1]},
    )
    ordered = replace(H100, axis_links={"a": H100.links[1], "b": H100.links[0]})
    assert shuffled.fingerprint() == ordered.fingerprint()
    code = "from autopar.costs.cluster import Cluster; print(Cluster.preset('h100').fingerprint())"
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONHASHSEED": "123"}
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == H100.fingerprint()


def test_resolve(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    mine = replace(H100, name="mine")
    mine.save(path)
    assert Cluster.resolve(mine) is mine
    assert Cluster.resolve("h100") == H100
    assert Cluster.resolve(path) == Cluster.resolve(str(path)) == mine
    with pytest.raises(ValueError, match=r"'h10' is neither a file nor a preset: did you mean 'h100'\?"):
        Cluster.resolve("h10")
    with pytest.raises(
        ValueError,
        match=r"no cluster preset 'abacus' \(known: a100-40gb, a100-40gb-pcie, .*, mi300x\)",
    ):
        Cluster.preset("abacus")


VALID = H100.to_toml()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory = 80000000000.0\n", "", r"missing key device\.memory: add it, in bytes"),
        ("latency = 3.4e-06\n", "", r"missing key links\[0\]\.latency: add it, in seconds per message"),
        ('name = "h100"\n', "", r"missing key name: add it"),
        ("launch =", "lanch =", r"unknown key device\.lanch: remove it: did you mean 'launch'\?"),
        ("[[links]]", "[[link]]", r"unknown key link: remove it: did you mean 'links'\?"),
        ("memory = 80000000000.0", "memory = -1", r"device\.memory must be a positive number, got -1"),
        ("memory = 80000000000.0", 'memory = "80GB"', r"device\.memory must be a number, in bytes, and is text"),
        ("memory = 80000000000.0", "memory = inf", r"device\.memory must be a positive number, got inf"),
        ("memory = 80000000000.0", "memory = true", r"device\.memory must be a number, in bytes, and is bool"),
        ("streaming = 0.8", "streaming = 2", r"device\.streaming is a share of the peak, at most 1, got 2"),
        ("units = 132", "units = 0.5", r"device\.units must be an integer, and is a number"),
        ("host = 1e-05", "host = -1", r"device\.host must be a number that is not negative, got -1"),
        ("efficiency = 0.75", "efficiency = 1.5", r"device\.efficiency is a share of the peak, at most 1, got 1\.5"),
        ("bandwidth = 50000000000.0", "bandwidth = 0", r"links\[1\]\.bandwidth must be a positive number, got 0"),
        ("bfloat16 =", "bfloat17 =", r"device\.flops\.bfloat17 is not a known dtype: did you mean 'bfloat16'\?"),
        ("float64 = 34000000000000.0", "float64 = 0", r"device\.flops\.float64 must be a positive number, got 0"),
        ("group_sizes = [8]", "group_sizes = [8, 16]", r"group_sizes has 2 entries for 2 links"),
        ("group_sizes = [8]", "group_sizes = [0]", r"group_sizes \[0\] must be positive integers"),
        ("group_sizes = [8]", "group_sizes = 8", r"group_sizes must be a list of integers, and is an integer"),
        ('name = "h100"', "name = 3", r"name must be text, and is an integer"),
        ('name = "NVLink 4"', 'name = ""', r"links\[0\]\.name must be a line of text, .* got ''"),
        ("[device]", "[device", r"not valid TOML: .*; Cluster\.save shows the format"),
        ("[device.flops]", "[axis_links.gpu]", r"missing key device\.flops: add it, operations per second by dtype"),
        (
            "group_sizes = [8]",
            "group_sizes = [8]\naxis_links = 1",
            r"axis_links must be a table, an \[axis_links",
        ),
        (
            "group_sizes = [8]",
            "group_sizes = [8]\naxis_links = {gpu = 1}",
            r"axis_links\.gpu must be a table, and is an",
        ),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in VALID
    path = tmp_path / "bad.toml"
    path.write_text(VALID.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"bad\.toml: " + message):
        Cluster.load(path)


def test_no_links() -> None:
    with pytest.raises(ValueError, match="links is empty: give at least one"):
        Cluster("none", H100.device, ())
    with pytest.raises(ValueError, match="flops must give operations per second by dtype"):
        replace(H100.device, flops={})


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Cluster.load(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.toml: not a text file in UTF-8"):
        Cluster.load(tmp_path / "binary.toml")
