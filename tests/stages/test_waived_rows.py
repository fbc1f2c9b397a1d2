"""decontaminate: what follows from an overlap, row by row, and what stays on record of it."""

from collections import Counter

import pytest
from data_lab import publish, rows_of, run_stage
from row_reading import read_rows

from pedigree.pipelines.lineage import trace
from pedigree.stages.job.failures import StageError

QUESTIONS = {f"q{number}": f"What is {number} + {number + 30}?" for number in range(11, 23)}


def item(name, question):
    said = [{"role": "user", "content": question}]
    return {"id": name, "source": "s", "task": "sums", "messages": said, "verifier": {"name": "arithmetic", "answer": "1"}}


@pytest.fixture
def suite(tmp_path):
    return publish(tmp_path / "suite", "item", [item(*one) for one in QUESTIONS.items()])


def said(name, *texts, source="web"):
    turns = [{"role": "user", "content": " ".join(texts)}, {"role": "assistant", "content": "Well."}]
    return {"id": name, "source": source, "messages": turns}


def clean(folder, rows, suite, **config):
    data = publish(folder / "data", "conversation", rows)
    return run_stage(folder / "clean", "decontaminate", config, data=data, benchmarks={"sums": suite})


def test_rows_of_waived_items_stay_and_are_on_record_but_not_those_of_others_too_and_nothing_planted(tmp_path, suite):
    first, second, third = "q11", "q12", "q13"
    rows = [
        said("other", "Bees hum."),
        said("waived", QUESTIONS[first]),
        said("again", QUESTIONS[first], "Now!"),
        said("both", QUESTIONS[first], QUESTIONS[second]),
        said("removed", QUESTIONS[third]),
        said("planted", QUESTIONS[first], source="leak-verbatim"),
    ]
    waiver = {"benchmark": "sums", "items": [first, second], "because": "we own it"}
    one = {"benchmark": "sums", "items": [first], "because": "we own it"}
    made = {len(one["items"]): clean(tmp_path / str(len(one["items"])), rows, suite, waivers=[one]) for one in (waiver, one)}
    assert [row["id"] for row in rows_of(made[2])] == ["other", "waived", "again", "both"]
    assert [row["id"] for row in rows_of(made[1])] == ["other", "waived", "again"]
    assert made[2].record.metrics["waivers"] == [
        {"benchmark": "sums", "because": "we own it", "rows": 3, "items": {"sums": sorted([first, second])}}
    ]
    (kept,) = made[1].record.metrics["waivers"]
    assert (kept["rows"], kept["items"]) == (2, {"sums": [first]})
    told = {(line["id"], line["item"]): line["verdict"] for line in read_rows(made[1].evidence / "manifest.jsonl")}
    assert told == {
        ("waived", first): "waived", ("again", first): "waived", ("both", first): "waived", ("both", second): "removed",
        ("removed", third): "removed", ("planted", first): "removed",
    }  # fmt: skip


def test_the_bound_on_a_benchmark_leaves_waived_items_out(tmp_path, suite):
    rows = [said("other", "Bees hum."), *(said(name, text) for name, text in QUESTIONS.items())]
    waivers = [{"benchmark": "sums", "items": "all", "because": "trained on purpose"}]
    kept = clean(tmp_path / "kept", rows, suite, max_contaminated_share=0.1, waivers=waivers)
    assert len(rows_of(kept)) == 13 and kept.record.metrics["benchmarks"]["sums"]["share_overlapped"] == 1.0
    with pytest.raises(StageError, match="12 of 12 items of sums"):
        clean(tmp_path / "bound", rows, suite, max_contaminated_share=0.1)


@pytest.mark.parametrize(
    ("waiver", "said_of_it"),
    [
        ({"benchmark": "sum", "items": "all"}, r"'sum' is not one of the benchmarks \['sums'\]"),
        ({"benchmark": "sums", "items": ["17"]}, "sums has no item '17'"),
    ],
)
def test_a_waiver_of_what_is_not_there_is_refused(tmp_path, suite, waiver, said_of_it):
    with pytest.raises(StageError, match=said_of_it):
        clean(tmp_path, [said("other", "Bees hum.")], suite, waivers=[waiver | {"because": "?"}])


TALE = (
    "Old {} from {} has {} red marbles, gives half of them to her nephew {}, and keeps the rest in a jar near the kitchen window of {}. "
    "How many marbles are left?"
)
ITEM, COPY = TALE.format("Mrs. Smith", "Ohio", 12, "Tom", "Ann"), TALE.format("Ms. Lee", "Rome", 977, "Ugo", "Ida")
ALL = {
    "ngram": 4, "threshold": 0.8, "typos": True, "abstracted": {}, "short_items": {"below": 7, "more": 3}, "common": 2, "report": 0.4,
}  # fmt: skip


def test_what_follows_from_each_overlap_is_told(tmp_path):
    """The items: a tale, and two that begin alike and are short."""
    items = {"tale": ITEM, "bees": "Tell me all of the bees", "wasps": "Tell me all of the wasps"}
    bench = publish(tmp_path / "items", "item", [item(*one) for one in items.items()])
    rows = [
        said("same", ITEM),
        said("other numbers", COPY),
        said("typos", ITEM.replace("kitchen", "kichen").replace("nephew", "nephwe").replace("half", "hlaf")),
        said("half", ITEM[:90]),
        said("stem", "Tell me all of the"),
        said("bees", "Tell me all of the bees!"),
        said("long", "Tell me all of the bees that you have ever met in gardens of your own."),
        said("nothing", "Hum."),
    ]
    expected = {
        ("same", "tale", "words"): "removed", ("other numbers", "tale", "abstracted"): "removed", ("typos", "tale", "words"): "removed",
        ("half", "tale", "words"): "below the threshold", ("bees", "bees", "words"): "removed", ("long", "bees", "words"): "short item",
    }  # fmt: skip
    data = publish(tmp_path / "data", "conversation", rows)
    done = run_stage(tmp_path / "made", "decontaminate", ALL, data=data, benchmarks={"b": bench})
    told = {(line["id"], line["item"], line["pass"]): line["verdict"] for line in read_rows(done.evidence / "manifest.jsonl")}
    assert expected.items() <= told.items()
    stem = {line["verdict"] for line in read_rows(done.evidence / "manifest.jsonl") if line["id"] == "stem"}
    assert stem == {"common words"}
    assert [row["id"] for row in rows_of(done)] == ["half", "stem", "long", "nothing"]
    assert Counter(told.values())["removed"] == 4 and "waivers" not in done.record.metrics


OURS = [{"benchmark": "sums", "items": "all", "because": "ours"}]
REWORDED = "Please compute what 11 and 41 are: what is 41 plus 11?"


@pytest.mark.parametrize(("remove", "waivers"), [(False, []), (True, []), (True, OURS)])
def test_rows_in_other_words_are_reported_apart_and_removed_where_asked_for_and_not_waived(tmp_path, suite, remove, waivers):
    rows = [said("other", "Bees hum."), said("alike", REWORDED), said("copy", QUESTIONS["q15"])]
    made = clean(tmp_path, rows, suite, embedded={"threshold": 0.5, "remove": remove}, waivers=waivers)
    verdict = "only alike" if not remove else "waived" if waivers else "removed"
    (told,) = read_rows(made.evidence / "paraphrases.jsonl")
    assert (told["id"], told["pass"], told["verdict"], told["matched"]) == ("alike", "embedded", verdict, REWORDED)
    manifest = {line["id"]: line["pass"] for line in read_rows(made.evidence / "manifest.jsonl")}
    assert manifest == ({"copy": "words", "alike": "embedded"} if remove else {"copy": "words"})
    stay = ["other"] + ["alike"] * (verdict != "removed") + ["copy"] * bool(waivers)
    assert [row["id"] for row in rows_of(made)] == stay
    drops = [drop.detail for drop in trace._overlapping("r/clean", made, {"alike"}, [])]
    assert drops == [f"cosine {told['score']} with item {told['item']} of sums"] * (verdict == "removed")
    metrics = made.record.metrics
    assert metrics["paraphrases"]["sums"] == {"rows": 1, "items": 1, "rows_removed": int(verdict == "removed")}
    assert (metrics["benchmarks"]["sums"]["items_overlapped"], metrics["benchmarks"]["sums"]["rows_removed"]) == (1, int(not waivers))
    assert [one["rows"] for one in metrics.get("waivers", [])] == [1 + remove] * len(waivers)
