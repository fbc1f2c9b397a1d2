"""A regular expression that takes for ever for one row ends the stage and names the row, in whatever process it was looked at."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.expectations import Expectation
from pedigree.configs.rows.filters import Filter
from pedigree.configs.rows.row_sources import Files
from pedigree.data.expectations.validation import examine, facts_of
from pedigree.data.filters import patience, row_filters
from pedigree.data.filters.patience import each
from pedigree.data.sources import dataset_builder, row_files, sources
from pedigree.data.sources.sources import Outside

FOR_EVER, VICTIM = r"(\w+\s?)+$", "a word " * 20 + "!"


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(patience, "SECONDS", 0.05)


def look_at(text):
    return re.search(FOR_EVER, text) is not None


def test_what_takes_too_long_is_named_and_nothing_of_the_clock_is_left():
    assert each(look_at, ["a word", "!"], str) == [True, False]
    with pytest.raises(PedigreeError, match=r"^look at a word .* takes more than 0\.05 s of CPU time: .* `\[ab\]\+` instead of"):
        each(look_at, ["!", VICTIM, "!"], "look at {}".format)
    with pytest.raises(ZeroDivisionError):
        each(lambda number: 1 // number, [1, 0], str)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0) and signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL


def test_many_things_may_take_longer_together():
    assert each(lambda text: sum(ord(letter) for letter in text), ["a" * 100_000] * 30, str) == [9_700_000] * 30


def test_what_it_takes_to_have_the_first_thing_is_no_look_at_it():
    def made():
        began = time.process_time()
        while time.process_time() - began < 0.2:
            pass
        yield "ab"

    assert each(len, made(), str) == [2]


def test_another_thread_gets_what_it_asked_for():
    found = []
    other = threading.Thread(target=lambda: found.extend(each(len, ["ab", "c"], str)))
    other.start()
    other.join()
    assert found == [2, 1]


@pytest.mark.parametrize(
    "config",
    [
        {"type": "pattern", "regex": FOR_EVER},
        {"type": "identity", "claims": [r"(\w+\s?)+ {name}"], "names": ["Nobody"]},
        {"type": "cutoff_dates", "patterns": [FOR_EVER]},
    ],
)
def test_filters_name_their_row(config):
    rows = [{"id": name, "messages": [{"role": "assistant", "content": text}]} for name, text in (("quick", "x"), ("slow", VICTIM))]
    one = TypeAdapter(Filter).validate_python(config)
    with pytest.raises(PedigreeError, match=f"filter {config['type']}.* in row slow takes more than"):
        row_filters.evidence_of(one, rows)


@pytest.mark.integration
def test_the_row_is_told_from_other_processes(tmp_path: Path, monkeypatch):
    texts = ["fine"] * 40 + [VICTIM] + ["fine"] * 40
    rows = [{"prompt": f"{number}?", "completion": text} for number, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 300)
    chosen = [TypeAdapter(Filter).validate_python({"type": "pattern", "regex": FOR_EVER})]
    parent, own = os.getpid(), patience.each
    monkeypatch.setattr(patience, "each", lambda *given: pytest.fail("looked at here") if os.getpid() == parent else own(*given))
    source = sources.opened(Files(type="files", path="a.jsonl"), "conversation", None, Outside(files={"a.jsonl": tmp_path / "a.jsonl"}))
    with (
        pytest.raises(PedigreeError, match=r"regex '.*', in row a-[0-9a-f]{16} takes"),
        dataset_builder.DatasetBuilder(tmp_path / "d", "conversation", chosen, 0, lambda verifier: None, 2) as laying,
    ):
        list(laying.take(source))


@pytest.mark.parametrize("asked", [{"expect": "column_values_to_not_match_regex", "regex": FOR_EVER},
                                   {"expect": "column_values_to_match_regex_list", "regex_list": ["a", FOR_EVER]}])  # fmt: skip
def test_expectations_name_their_row(asked):
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    facts = facts_of([{"id": name, "source": "s", "messages": turns} for name in ("quick", "slow")], "conversation", lambda _: None)
    expected = [Expectation.model_validate({**asked, "column": "answer"})]
    with pytest.raises(PedigreeError, match=rf"{asked['expect']} of answer, regex .* in row slow takes"):
        examine(facts, "conversation", expected, texts_of=lambda count: pa.table({"answer": ["x", VICTIM]}))
