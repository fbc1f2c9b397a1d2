"""Preferences to pairs, and rows to documents that fit."""

import json
import tracemalloc

import models
import pytest
from data_lab import publish
from row_reading import read_rows

from pedigree.data.chat.documents import schema
from pedigree.stages.core.batches import Document, document
from pedigree.stages.job.failures import StageError
from pedigree.stages.training.training_rows import fitting, gather, pairs


def preference(name, *scores, strength=None):
    """Answers a, b, c ... with scores."""
    answers = [{"text": text, "score": score} for text, score in zip("abcdef", scores, strict=False)]
    return {"id": name, "source": "s", "messages": [{"role": "user", "content": "?"}], "answers": answers, "strength": strength}


def made(rows, lists="all"):
    return [(one["id"], one["chosen"], one["rejected"], one["margin"]) for one in pairs(rows, lists)]


@pytest.mark.parametrize("lists", ["best_vs_worst", "adjacent", "all"])
def test_a_pair_is_itself_however_lists_are_compared(lists):
    (one,) = pairs([preference("p", 1.0, 1.0, strength=0.5)], lists)
    assert one == {
        "id": "p", "list": "p", "source": "s", "messages": [{"role": "user", "content": "?"}], "chosen": "a", "rejected": "b",
        "ended": (True, True), "win_rates": None, "strength": 0.5, "margin": 0.0,
    }  # fmt: skip


def test_a_ranked_list_by_each_way():
    rows = [preference("l", 3.0, 2.0, 2.0, None)]
    assert made(rows, "best_vs_worst") == [("l/0-3", "a", "d", None)]
    assert made(rows, "adjacent") == [("l/0-1", "a", "b", 1.0), ("l/2-3", "c", "d", None)]  # b and c are equally good
    assert [name for name, *_ in made(rows)] == ["l/0-1", "l/0-2", "l/0-3", "l/1-3", "l/2-3"]
    assert {one["list"] for one in pairs(rows, "all")} == {"l"}


def test_an_unscored_list_is_ranked_all_the_same():
    assert len(made([preference("l", None, None, None)])) == 3


def test_singles_give_no_pair_and_nothing_but_singles_is_an_error():
    assert made([preference("s", 1.0), preference("p", None, None)]) == [("p", "a", "b", None)]
    with pytest.raises(StageError, match="none of 2 preferences yields a pair"):
        pairs([preference("s", 1.0), preference("l", 1.0, 1.0, 1.0)], "all")


LONG = Document.of((1, 2, 3, 4, 5), (False, False, True, True, True))
LATE = Document.of((1, 2, 3, 4, 5), (False, False, False, False, True))
SHORT = Document.of((1, 2), (False, True))
OTHER = Document.of((1, 3), (False, True))


def fitted(tmp_path, too_long):
    job, given = models.a_job(tmp_path), {"long": (LONG, SHORT), "late": (SHORT, LATE), "short": (SHORT, OTHER)}
    documents = models.batch_of([(doc.ids, doc.trained.tolist()) for unit in given.values() for doc in unit], schema(5))
    rows, kept = fitting([{"id": name, "source": "s"} for name in given], models.units_of_batch(documents, 2), 4, job, too_long)
    return [row["id"] for row in rows], kept, json.loads((job.evidence / "counts.json").read_text())


def test_rows_that_are_too_long_are_dropped(tmp_path):
    names, _, counts = fitted(tmp_path, "drop")
    assert (names, counts["kept"], counts["truncated"]) == (["short"], 1, 0)
    assert counts["dropped"] == [{"source": "s", "reason": "longer than max_length 4", "rows": 2}]


def test_or_lose_their_end_and_are_dropped_where_nothing_is_left_to_train(tmp_path):
    names, units, counts = fitted(tmp_path, "truncate")
    assert names == ["long", "short"] and units[0] == (Document.of((1, 2, 3, 4), (False, False, True, True)), SHORT)
    assert counts["truncated"] == 2 and counts["dropped"] == [{"source": "s", "reason": "no trained token", "rows": 1}]


def written(**units):
    """Units of documents written as (prompt, answer, ...), in letters: name → documents."""
    ids = {name: [[[ord(one) % 32 for one in text] for text in unit] for unit in [given]] for name, given in units.items()}
    documents = [document(*unit[place : place + 2]) for [unit] in ids.values() for place in range(0, len(unit), 2)]
    per_row = len(documents) // len(units)
    return models.units_of_batch(models.batch_of([(doc.ids, doc.trained.tolist()) for doc in documents], schema(40)), per_row)


def test_a_pair_that_differs_in_no_token_teaches_nothing_and_is_dropped_with_its_reason(tmp_path):
    """Cut to four tokens, or because the template strips what they differ in."""
    job, names = models.a_job(tmp_path), ("cut", "stripped", "late", "kept")
    units = written(
        cut=("ab", "cde", "ab", "cdf"), stripped=("ab", "c", "ab", "c"), late=("ab", "cd", "ab", "cde"), kept=("a", "bc", "a", "bcd")
    )
    rows, kept = fitting([{"id": name, "source": "s"} for name in names], units, 4, job, "truncate")
    assert [row["id"] for row in rows] == ["kept"] and len(kept) == 1
    counts = json.loads((job.evidence / "counts.json").read_text())
    assert (counts["kept"], counts["truncated"]) == (1, 2)
    assert counts["dropped"] == [
        {"source": "s", "reason": "equal answers", "rows": 1}, {"source": "s", "reason": "equal answers after truncation", "rows": 2},
    ]  # fmt: skip
    assert [(row["id"], row["reason"]) for row in read_rows(job.evidence / "drops.jsonl")] == [
        ("cut", "equal answers after truncation"), ("stripped", "equal answers"), ("late", "equal answers after truncation"),
    ]  # fmt: skip
    (mark,) = job.marks
    assert mark.startswith("3 of 4 pairs were not trained or measured") and "max_length 4" in mark
    with pytest.raises(StageError, match=r"none of 2 rows is left: .* or compare answers that are equal"):
        fitting([{"id": name, "source": "s"} for name in ("a", "b")], written(a=("a", "b") * 2, b=("a", "c") * 2), 4, job)


def test_no_row_is_counted_where_all_differ(tmp_path):
    job = models.a_job(tmp_path)
    fitting([{"id": "a", "source": "s"}], written(a=("a", "b", "a", "c")), 4, job)
    fitting([{"id": "a", "source": "s"}, {"id": "b", "source": "s"}], written(a=("a", "b"), b=("a", "b")), 4, job)  # SFT may repeat rows
    assert not job.marks


def test_the_same_tokens_are_never_good_and_bad(tmp_path):
    """Sides of one pair, and single answers to one prompt; what two people judged differently is no accident of tokens."""
    job = models.a_job(tmp_path)
    given = {
        "pair+": ("ab", "cde", 1), "pair-": ("ab", "cdf", 0), "one": ("b", "cdef", 1), "other": ("b", "cdea", 0),
        "prompt": ("c", "cdef", 0),
        "same+": ("d", "e", 1), "same-": ("d", "e", 0), "good": ("e", "fgh", 1), "also good": ("e", "fghi", 1),
    }  # fmt: skip
    rows = [{"id": name, "source": "s", "text": text, "ended": True, "label": float(label)} for name, (_, text, label) in given.items()]
    units = written(**{name: one[:2] for name, one in given.items()})
    kept, _ = fitting(rows, units, 4, job, "truncate", labelled=True)
    assert [row["id"] for row in kept] == ["prompt", "same+", "same-", "good", "also good"]
    assert job.marks[0].startswith("4 of 9 answers were not trained or measured")


def test_rows_that_training_reads_stay_on_the_disk(tmp_path):
    """Also those of several data sets, and whether they are asked for one after the other or here and there."""
    turns = [{"role": "user", "content": "a" * 20_000}, {"role": "assistant", "content": "b"}]
    rows = [{"id": str(number), "source": "s", "messages": turns} for number in range(2000)]
    data = [publish(tmp_path / name, "conversation", rows) for name in ("one", "two")]
    del rows
    tracemalloc.start()
    try:
        given = gather(data)
        assert len(given) == 4000 and [given[place]["id"] for place in (0, 1999, 2000, 3999)] == ["0", "1999", "0", "1999"]
        assert sum(len(row["messages"][0]["content"]) for row in given) == 80_000_000
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 60_000_000
