"""What a recipe says of mixtures: amounts that cannot be confused or do not add up, and rows of other stages before the gate."""

from typing import Any

import pytest
from pydantic import ValidationError
from recipe_lab import Recipe

from pedigree.configs.rows.datasets import PrepareData


def problem(sources: list[dict[str, Any]], **stage: Any) -> str:
    given = [{"type": "files", "path": f"{number}.jsonl", **source} for number, source in enumerate(sources)]
    with pytest.raises(ValidationError) as caught:
        PrepareData.model_validate({"record": "conversation", "sources": given, **stage})
    return caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"count": 0.25}, "count is 0.25, but must be a number of rows: write share: 0.25, a part of the stage's `total`"),
        ({"count": 5000.0}, "count is 5000.0, but must be a number of rows: write a whole number, e.g. 5000"),
        ({"share": 5000}, "share is 5000, but must be a fraction of `total`: write count: 5000 for that"),
        ({"share": 1}, "share is 1, but must be a fraction of `total`: write 1.0 for all rows, or count: 1 for that"),
        ({"share": 1.5}, "Input should be less than or equal to 1"),
        ({"count": True}, "Input should be a valid integer"),
        ({"count": 5, "share": 0.5}, "count and share all set the number of rows: keep one"),
        ({"repeat": True}, "repeat requires `count` or `share`"),
        ({"epochs": 2, "repeat": True}, "repeat requires `count` or `share`"),
        ({"weights": {"a": 1.0}}, "weights divide `count` or `share`: set one of them"),
        ({"weights": {"a": 0.0}, "count": 3}, "the weight of a is 0.0, but must be above 0: remove a"),
        ({"weights": {"a": 1.0}, "count": 3, "most_per_source": 1}, "remove one of them"),
        ({"share": 0.5}, "source 0 has a share, but `total` is not set: set it, or use count"),
        ({"epochs": 1.5}, "source 0 repeats rows, which filters would drop as duplicates: set `draw: after_filters` in the stage"),
    ],
)
def test_an_amount_that_may_be_meant_otherwise_is_refused(source, said):
    assert said in problem([source])


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([{"share": 0.5}, {"share": 0.4}], "the shares add up to 0.9 of total 1000, but no source has a count: make them add up to 1"),
        ([{"share": 0.5}, {"share": 0.6}], "the shares add up to 1.1 of total 1000"),
        ([{"share": 0.9}, {"count": 200}], "counts leave 800 rows, or 0.8: make them add up to 0.8"),
        (
            [{"share": 0.9}, {"count": 1000}],
            "the counts of some sources add up to 1000 rows, which leaves none of total 1000 for shares: raise total",
        ),
        ([{"count": 300}, {"count": 200}], "the counts of all sources add up to 500 rows, but total is 1000: make them equal"),
        ([{"share": 1.0}, {}], "total is 1000, but source 1 has no share or count: set one"),
        ([{"share": 1.0}, {"epochs": 0.5}], "source 1 has no share or count"),
        ([{"share": 0.9999}, {"share": 0.0001}], "share 0.0001 of total 1000 rounds to 0 rows: raise it, or remove source 1"),
    ],
)
def test_what_does_not_add_up_is_refused(sources, said):
    assert said in problem(sources, total=1000)


def test_shares_add_up_to_the_row():
    thirds = [{"type": "files", "path": name, "share": share} for name, share in (("a", 0.333), ("b", 0.333), ("c", 0.333))]
    made = {
        "record": "conversation",
        "sources": [*thirds, {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 1, "seed": 1}],
    }
    assert PrepareData.model_validate({**made, "total": 1000}).amounts == [333, 333, 333, 1]
    with pytest.raises(ValidationError, match=r"make them add up to 0\.9999"):
        PrepareData.model_validate({**made, "total": 10000})


def test_items_are_asked_once():
    suite = {"record": "item", "task": "sums", "draw": "after_filters"}
    assert "each item of a suite must be unique" in problem([{"epochs": 2.0}], **suite)


# --- rows of other stages ----------------------------------------------------------------------------------------------

SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 9, seed: 1}"
RECIPE = f"""\
stages:
  suite: {{kind: prepare_data, record: item, task: sums, sources: [{SUMS}]}}
  raw: {{kind: prepare_data, record: conversation, sources: [{SUMS}]}}
  clean: {{kind: decontaminate, in: {{data: raw, benchmarks: [suite]}}}}
  pairs_raw: {{kind: prepare_data, record: preference, sources: [{SUMS}]}}
  pairs: {{kind: decontaminate, in: {{data: pairs_raw, benchmarks: [suite]}}}}
  mixed:
    kind: prepare_data
    in: {{rows: [clean, pairs]}}
    record: conversation
    sources: [{{type: artifact, input: clean, epochs: 2.0}}, {{type: artifact, input: pairs}}]
    draw: after_filters
  base: {{kind: source_model, source: {{type: packaged, asset: smollm2-135m-instruct}}}}
  sft:
    kind: sft
    in: {{policy: base, data: [mixed]}}
    global_batch: 4
    max_length: 32
    optimizer: {{learning_rate: 1e-4}}
  scores: {{kind: evaluate, in: {{policies: [sft], suites: [suite]}}, sampling: {{max_tokens: 4}}}}
"""


MIX = Recipe(RECIPE)


def test_decontaminated_rows_are_decontaminated_when_they_are_mixed_again(tmp_path):
    graph = MIX.load(tmp_path)
    assert graph.find("mixed").parents == ("made/clean", "made/pairs") and graph.find("mixed").output == "conversation"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[clean, pairs]", "{clean: raw, pairs: pairs}"),  # one that was never checked
        ("{type: artifact, input: pairs}]", f"{{type: artifact, input: pairs}}, {SUMS}]"),  # rows from elsewhere beside them
        ("[suite]}}\n  pairs_raw", "[other]}}\n  pairs_raw"),  # one that was checked against something else
    ],
)
def test_nothing_that_was_not_decontaminated_slips_through_a_mixture(tmp_path, old, new):
    other = f"  other: {{kind: prepare_data, record: item, task: more, sources: [{SUMS}]}}\n  raw:"
    (found,) = MIX.complaints(tmp_path, (old, new), ("  raw:", other))
    assert "stage sft: trains on made/mixed, which is not decontaminated against made/suite" in found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("input: pairs}", "input: pears}", "a source reads the input 'pears', but `rows` has clean, pairs: use one of them"),
        (", {type: artifact, input: pairs}]", "]", "`rows` has pairs, which no source reads: add {type: artifact, input: pairs} to"),
        ("    in: {rows: [clean, pairs]}\n", "", "this config requires input 'rows': name a stage with output"),
        ("record: conversation\n    sources: [{type: art", "record: preference\n    sources: [{type: art", "clean is of "
         "type conversation, but record preference requires preference: change the record or the input"),
        ("rows: [clean, pairs]", "rows: [clean, pairs, suite]", "input 'rows' is suite of type item; it must be conversation or"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_the_sources_are_told(tmp_path, old, new, said):
    assert any(said in found for found in MIX.complaints(tmp_path, (old, new)))


# --- order -------------------------------------------------------------------------------------------------------------


def ordered(order: str, sft: str) -> list[tuple[str, str]]:
    return [
        ("in: {policy: base, data: [mixed]}", f"in: {{policy: base, data: [clean]}}\n    order: {sft}"),
        ("  raw: {kind: prepare_data, ", f"  raw: {{kind: prepare_data, order: {order}, "),
    ]


def test_an_order_that_training_would_shuffle_away_is_refused(tmp_path):
    for order in ("by_source", "{by: length}"):
        (found,) = MIX.complaints(tmp_path, *ordered(order, "shuffled"))
        assert "stage raw: orders its rows, but sft shuffles them: set `order: given` there" in found
    for order, sft in (("by_source", "given"), ("shuffled", "shuffled"), ("shuffled", "given")):
        assert MIX.load(tmp_path, *ordered(order, sft)).find("sft")
