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
AS_IN_1_2 = {
    "010": 10, "08": 8, "-010": -10, "0o10": 8, "0x1F": 31, "+12": 12, "1.": 1.0, ".5e3": 500.0, "True": True, "FALSE": False, "~": None,
    "": None, **{text: text for text in ("no", "off", "yes", "on", "y", "N", "12:30", "1:30.5", "1_000", "1_0.5", "0b1", "2024-01-01", "=",
    "2001-12-14t21:59:43.10-05:00", "nullx", "truer", "1.2.3", "0o9", "0xg")},
}  # fmt: skip
"""Plain scalars as the core schema of YAML 1.2 reads them (section 10.3.2); 1.1 sees numbers, dates and truth values in more of them."""


def test_numbers_are_what_they_look_like():
    assert repr({text: parse_value(text) for text in NUMBERS}) == repr(NUMBERS)
    with pytest.raises(ValueError, match="not valid YAML"):
        parse_value("[1, 2")


def test_scalars_are_read_as_in_yaml_1_2(tmp_path):
    lines = "\n".join(f"- {text}" for text in AS_IN_1_2)
    assert repr(parse_value(lines)) == repr(list(AS_IN_1_2.values()))
    assert repr(read_document(written(tmp_path, f"a:\n{lines}\n")).value["a"]) == repr(list(AS_IN_1_2.values()))


def test_merge_keys_and_aliases_are_read(tmp_path):
    text = "a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\ne: {<<: [*x]}\n"
    assert read_document(written(tmp_path, text)).value == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}, "e": {"b": 1, "c": 2}}


@pytest.mark.parametrize("key", ["010", "1.5", "true", "~", "null"])
def test_a_key_that_is_no_text_is_refused_with_its_line(tmp_path, key):
    with pytest.raises(ConfigError, match=f"file.yaml:2: key is '{key}', not a string: quote it"):
        read_document(written(tmp_path, f"a: 1\n{key}: 2\n"))
    assert read_document(written(tmp_path, f"'{key}': 2\n")).value == {key: 2}


def test_every_repeated_key_is_a_problem_on_its_line(tmp_path):
    path = written(tmp_path, "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n")
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    assert [(problem.line, problem.message) for problem in caught.value.problems] == [
        (5, "duplicate key 'c': lines 3 and 5 both set it; keep one"),
        (6, "duplicate key 'a': lines 1 and 6 both set it; keep one"),
    ]


REPEATED = [
    ("a: {x: 1, y: 2}\nb: 1\na: {x: 3, y: 4}\n", [(3, "duplicate key 'a': lines 1 and 3 both set it; keep one")]),
    ("a: 1\na: 2\na: 3\n", [(3, "duplicate key 'a': lines 1, 2 and 3 all set it; keep one")]),
    ("a: &x\n  b: 1\n  b: 2\nc: *x\nd: [*x, *x]\n", [(3, "duplicate key 'b': lines 2 and 3 both set it; keep one")]),
    ("a: {x: 1, x: 2}\n", [(1, "duplicate key 'x': line 1 sets it twice; keep one")]),
]
"""With the keys inside of both, three times, behind an anchor, on one line."""


@pytest.mark.parametrize(("text", "expected"), REPEATED)
def test_a_key_that_is_there_twice_is_reported_once_with_its_lines(tmp_path, text, expected):
    with pytest.raises(ConfigError) as caught:
        read_document(written(tmp_path, text))
    assert [(problem.line, problem.message) for problem in caught.value.problems] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file.yaml: is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n", "must be a mapping"),
        ("a: [\n", "not valid YAML"),
        ("a: b: c\n", "not valid YAML"),
        ("a: \x01\n", "not valid YAML"),
        ("a: &x\n  b: *x\n", "alias refers to its own anchor"),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("a: 1\n? [b, c]\n: 2\n", r"file.yaml:2: key is a list or a mapping, not a string"),
        ("a: 1\nb: {{ x }}\n", r"file.yaml:2: key is a list or a mapping, not a string: quote text that begins with {"),
        ("a:\n\tb: 1\n", "file.yaml:2: not valid YAML: indented with a tab; use spaces"),
        ("a: b: c\n", "file.yaml:1: not valid YAML: two `: ` in one value, or a line .* quote it, or align the line"),
        ("a: 1\n  b: 2\n", "file.yaml:2: not valid YAML: two `: ` in one value, or a line indented further than the key above"),
        ("a: {b: 1\nc: 2\n", "file.yaml:2: not valid YAML: a comma is missing, or the bracket opened in line 1 is not closed"),
        ("a: [1, 2\n", "a comma is missing, or the bracket opened in line 1 is not closed"),
        ("a:\n  b: 1\n c: 2\n", "file.yaml:3: not valid YAML: not aligned with the lines above, or a bracket too many"),
        ("a: {b: 1}}\n", "file.yaml:1: not valid YAML: not aligned with the lines above, or a bracket too many"),
        ("a: 'x\nb: 1\n", "not valid YAML: the quotation mark in line 1 is not closed"),
        ("a: 1\nfoo\nb: 2\n", "not valid YAML: line 2 has no `: ` after its key"),
        ("a: @x\n", "file.yaml:1: not valid YAML: quote text that begins with @"),
        ('a: "\\d+"\n', "file.yaml:1: not valid YAML: in double quotes, .* write single quotes"),
        ("a: 1\nb: x\0y\n", r"file.yaml:2: not valid YAML: the character '\\x00' is not allowed"),
        (f"a: 1\nb: {'9' * 5000}\n", "file.yaml:2: not valid YAML: an integer has 5000 digits"),
        ("a: 1\n---\nb: 2\n", "file.yaml:2: not valid YAML: expected a single document in the stream, but found another document"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_document(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        read_document(tmp_path / "none.yaml")


NO_VALUES = {"!!bool yes": "'yes' is not of the type bool", "!!int 1_000": "'1_000' is not of the type int", "<<": "'<<' is a key"} | {
    text: "the tag [^ ]* is not known: remove it"
    for text in (
        "!!timestamp 2024-01-01",
        "!!timestamp x",
        "!!set {a, b}",
        "!!binary aGk=",
        "!!omap [a: 1]",
        "!own 1",
        "!!python/tuple [1]",
    )
}
"""Values of types of YAML 1.1, or of none."""


@pytest.mark.parametrize("text", NO_VALUES)
def test_tags_beyond_the_core_schema_are_refused_with_their_line(tmp_path, text):
    with pytest.raises(ConfigError, match=f"^file.yaml:2: not valid YAML: {NO_VALUES[text]}$"):
        read_document(written(tmp_path, f"a: 1\nb: {text}\n"))
    with pytest.raises(ValueError, match=NO_VALUES[text]):
        parse_value(text)
    tagged = "{a: !!str 010, b: !!float 1, c: !!int '7', d: !!map {e: !!null ''}}"
    assert repr(parse_value(tagged)) == "{'a': '010', 'b': 1.0, 'c': 7, 'd': {'e': None}}"


@pytest.mark.parametrize(
    ("text", "message"), [("{b: 1, b: 2}", "duplicate key 'b'"), ("{1: a}", "key is '1'"), ("[1e400]", "number that is not finite")]
)
def test_a_value_of_the_command_line_is_held_to_the_same_rules(text, message):
    with pytest.raises(ValueError, match=message):
        parse_value(text)


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
