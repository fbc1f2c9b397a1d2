"""YAML with lines: numbers as people write them, repeated keys refused, the line of every problem."""

from pathlib import Path

import pytest

from pedigree.configs.base import document
from pedigree.configs.base.document import ConfigError, parse_value, read_document


def written(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text)
    return path


NUMBERS = {"5E3": 5000.0, ".5": 0.5, "-1.5e-3": -0.0015, "12": 12, "1e": "1e", "v1e-4": "v1e-4", "[1e-4, a]": [0.0001, "a"]}
"""YAML 1.1 reads a string where there is no point."""


def test_numbers_are_what_they_look_like():
    assert repr({text: parse_value(text) for text in NUMBERS}) == repr(NUMBERS)
    with pytest.raises(ValueError, match="not valid YAML"):
        parse_value("[1, 2")


def test_every_repeated_key_is_a_problem_on_its_line(tmp_path):
    path = written(tmp_path, "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n")
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    assert [(problem.line, problem.message) for problem in caught.value.problems] == [
        (5, "duplicate key 'c'"),
        (6, "duplicate key 'a'"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping"),
        ("- a\n", "must be a mapping"),
        ("a: [\n", "not valid YAML"),
        ("a: b: c\n", "not valid YAML"),
        ("a: \x01\n", "not valid YAML"),
        ("a: &x\n  b: *x\n", "alias refers to its own anchor"),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("a: 1\n? [b, c]\n: 2\n", r"file.yaml:2: key is a list or a mapping"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_document(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        read_document(tmp_path / "none.yaml")


def test_lines_of_values_and_of_what_surrounds_missing_ones(tmp_path):
    document = read_document(written(tmp_path, "a: 1\nb:\n  c:\n    - x\n    - y\n"))
    assert document.line(("b", "c", 1)) == 5
    assert document.line(("b", "c")) == 3
    assert document.line(("b", "nothing", 7)) == 2
    assert str(document.problem(("b", "c"), "is odd")) == "file.yaml:3: is odd"


def test_what_libyaml_refuses_is_read_too(tmp_path):
    assert read_document(written(tmp_path, "a: {b: 1e-4, c:}\nd: 1e3\n")).value == {"a": {"b": 0.0001, "c": None}, "d": 1000.0}


def test_both_parsers_read_every_shipped_recipe_alike(monkeypatch):
    recipes = sorted((Path(document.__file__).parents[1] / "recipes").glob("*.yaml"))
    fast = [read_document(path) for path in recipes]
    monkeypatch.setattr(document, "FastLoader", document.Loader)
    assert recipes
    assert [read_document(path) for path in recipes] == fast
