"""Every code that serai raises can be explained, and every explanation belongs to a code that is raised."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from serai.cli.explain import explanations

PACKAGE = Path(__file__).parents[1] / "src" / "serai"
CODE = re.compile(r"S\d{3}")
NOT_RAISED = {"S000"}
"""Bases of the error classes that nothing raises by itself, and mistakes in serai."""


def codes_in_source() -> dict[str, set[str]]:
    """Code → files with that code as a whole string."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
                found[node.value].add(str(path.relative_to(PACKAGE)))
    return found


def test_every_code_has_an_explanation_with_all_its_parts() -> None:
    known = explanations()
    missing = {
        code: files
        for code, files in codes_in_source().items()
        if code not in known and code not in NOT_RAISED
    }
    assert not missing
    for code, entry in known.items():
        assert CODE.fullmatch(code)
        assert set(entry) == {"title", "rule", "reason", "fix"}, code
        assert all(text.strip() for text in entry.values()), code


def test_nothing_is_explained_that_is_never_raised() -> None:
    assert not explanations().keys() - codes_in_source().keys()


def test_the_explanations_are_sorted() -> None:
    codes = list(explanations())
    assert codes == sorted(codes)
