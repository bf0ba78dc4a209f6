"""Plans made by hand, so that reports can be tested without a search."""

from autopar.costs.cluster import Cluster
from autopar.ir.layout import Partial, Replicate, Split
from autopar.ir.plan import Certificate, ModuleRow, Plan, Predicted

R = Replicate()


def hand_made_plan(
    lower_bound: float = 0.0122, method: str = "elimination", module: str = "layers.*.mlp.down_proj"
) -> Plan:
    """A plan of two axes with one repeated module, and figures that are easy to find in a text."""
    return Plan(
        axes=(("node", 32), ("gpu", 8)),
        cluster=Cluster.preset("h100"),
        parameters={"embed.weight": (R, Split(1)), "layers.0.mlp.down_proj.weight": (R, Split(1))},
        batch={"0": (Split(0), R)},
        results={"0": (Partial("sum"), R)},
        choices={"mm": ("m", "k")},
        consumer_layouts={},
        optimizer="adamw",
        fingerprint="0" * 16,
        torch="2.13.0",
        certificate=Certificate(0.0125, lower_bound, "one layout per tensor on every axis; no pipelines", method),
        predicted=Predicted(
            step_seconds=0.0125,
            compute_seconds=0.01,
            memory_bytes={"parameters": 2.0**30, "gradients": 2.0**30, "optimizer": 2.0**31, "buffers": 512.0},
            communication_bytes={"node": 3 * 2.0**20, "gpu": 2.0**20},
            collectives={"node": {"all_reduce": 5}, "gpu": {"all_gather": 7, "reduce_scatter": 2}},
        ),
        modules=(
            ModuleRow("", 1, {}, 1e-5, {}, 512.0),
            ModuleRow("embed", 1, {"weight": "f32[vocab, hidden{gpu}]"}, 2e-4, {"gpu": 0.0}, 2.0**28),
            ModuleRow(
                module,
                32,
                {"weight": "f32[hidden, ffn{gpu}]", "output": "f32[(batch{node} seq), hidden] +sum{gpu}"},
                0.0119,
                {"node": 3 * 2.0**20, "gpu": 2.0**20},
                2.0**31,
            ),
        ),
    )
