"""The rule of published scores is kept for the benchmark that it belongs to; training and our own suites have the better one."""

import re
from pathlib import Path

import pytest

from pedigree.configs.rows.row_sources import Read
from pedigree.data.sources.verifiable import NAMES

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {"minerva_math": "minerva_math", "strict_minerva_math": "minerva_math", "gsm8k": "gsm8k"}
"""Verifier by a published rule → form of the benchmark whose scores were published by it."""
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_only_the_form_of_its_benchmark_names_a_published_rule(name):
    """Of all forms, recipes, starters and rehearsals; the form does, since its scores are to be those of others."""
    naming = {path.relative_to(ROOT) for path in CONFIGS if re.search(rf"\b(?:verifier|name): [\"']?{name}\b", path.read_text())}
    assert naming == {Path("configs/forms") / f"{PUBLISHED[name]}.yaml"}


def test_no_layout_gives_a_row_a_published_rule():
    """A name in rows of another project means what is asked there, not the rule by which it is scored: `gsm8k` is read whole."""
    assert not set(NAMES.values()) & PUBLISHED.keys() and NAMES["gsm8k"] == "gsm" and NAMES["math"] == "math"
    given = re.compile(r"[\"']name[\"']: [\"'](\w+)[\"']")
    named = {name for path in (ROOT / "data").rglob("*.py") for name in given.findall(path.read_text())}
    assert "gsm" in named and not named & PUBLISHED.keys()


def test_a_recipe_may_ask_for_the_rule_of_gsm8k_but_not_for_that_of_minerva():
    choices = str(Read.model_fields["verifier"].annotation)
    assert "'gsm8k'" in choices and "minerva" not in choices
