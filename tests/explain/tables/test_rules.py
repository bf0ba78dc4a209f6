from autopar.explain.rules import list_rules
from autopar.explain.tables.rules import DISCOVERED, coverage_table, operators_table
from tests import models
from tests.strategies.proven import counts


def test_every_rule_is_listed_once() -> None:
    rows = list_rules(only="aten.mm")
    samples = counts()["aten.mm.default"]
    assert rows == [{"family": "matmul", "operator": "aten.mm.default", "equations": [], "samples": samples}]
    text = operators_table([*rows, {"family": DISCOVERED, "operator": "my.op", "equations": ["a->a"], "samples": 6}])
    assert "1 written rules, 1 discovered" in text
    assert max(map(len, text.splitlines())) <= 100


def test_equations_of_a_model() -> None:
    model, batch = models.mlp()
    rows = {row["operator"]: row for row in list_rules((model, batch, None, None))}
    assert rows["aten.mm.default"]["equations"] == ["mk,kn->mn"]
    assert rows["aten.bmm.default"]["equations"] == []


def test_counts_add_up() -> None:
    counts = {"all": {"written": 3, "replicated": 1}, "differentiable": {"written": 2, "replicated": 0}}
    dtype = {"operators": 4, **counts, "checks": 7, "failures": {}, "blocking": {"aten.x": 1}, "not_captured": {}}
    figures = {
        "by_dtype": {"float64": dtype},
        "overloads": {"aten.x": "replicated"},
        "traced_overloads": 2,
        "dtensor_overloads": 1,
    }
    text = coverage_table(figures)
    assert "7 strategies on real values; 0 refuted" in text
    assert "1 x aten.x" in text
    assert "1 of the 2 overloads" in text
