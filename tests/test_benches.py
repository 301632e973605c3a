"""Every benchmark can be run by `make bench`: checked on its text, since measuring takes minutes."""

from __future__ import annotations

import ast

import pytest
from source_kit import ROOT, functions_of, tree_of

BENCHES = sorted((ROOT / "bench").glob("bench_*.py"))


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_benchmark_when_listed_has_a_run_without_necessary_arguments(path):
    """``run()`` exists, can be called without arguments, and says what it returns."""
    run = next((item for item in tree_of(path).body if isinstance(item, ast.FunctionDef) and item.name == "run"), None)
    assert run is not None, f"{path.name} has no run()"
    assert len(run.args.posonlyargs + run.args.args) == len(run.args.defaults)
    assert None not in run.args.kw_defaults
    assert run.returns is not None
    assert ast.get_docstring(run)


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_benchmark_when_run_by_itself_is_a_program(path):
    """A benchmark can be run by itself, with options of its own."""
    assert "__main__" in path.read_text("utf-8")
    assert any(item.name == "main" for item in functions_of(tree_of(path)))
