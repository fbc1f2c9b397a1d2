"""The data sets of the flagship recipes, each with its quirks: what becomes of every row, and why the others are refused.

`configs/rehearsal/hub` is a mirror's folder; its rows are made up, in the columns and forms of the real sets.
"""

import errno
import gzip
import shutil
import zlib
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet
from row_reading import Loaded, load, load_items, read_rows, write_file
from sweeps import nightly_after

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.row_sources import Hub, RecordType
from pedigree.configs.rows.suite_forms import load_form
from pedigree.data.sources import hub
from pedigree.data.sources.sources import Outside
from pedigree.data.store.storage import StoreError
from pedigree.stages.verifiers import check, verify

HUB = Path(__file__).parents[2] / "configs" / "rehearsal" / "hub"
BINARIZED, CLEANED = "HuggingFaceH4/ultrafeedback_binarized", "allenai/ultrafeedback_binarized_cleaned"
EMPTY_CHATS = "chosen does not end with the assistant's turn"
OTHER_BEGINNING = "chosen and rejected do not answer the same beginning"

Case = tuple[str, RecordType, str, int, dict[int, str]]
"""(data set, record, split, usable rows, number of each other row → why it is refused)"""
CASES: list[Case] = [
    ("allenai/tulu-3-sft-mixture", "conversation", "train", 8, {
        7: "conversation rows need an answer, which this one lacks: it ends with the user's turn, see `out_of_turn.user_last`",
        8: "the answer is empty",
        9: "there are no messages",
        10: "the answer is empty",  # null
        11: "turn 1 is the user's where the assistant's is due: see `out_of_turn.same_role`",
    }),
    ("allenai/tulu-3-sft-olmo-2-mixture-0225", "conversation", "train", 5, {
        4: "turn 1 is the tool's where the assistant's is due",
        5: "turn 2 is the system's where the user's is due: see `out_of_turn.late_system`",
        6: "turn 0 is the assistant's where the user's is due: see `out_of_turn.assistant_first`",
    }),
    ("allenai/llama-3.1-tulu-3-8b-preference-mixture", "preference", "train", 5, {
        4: OTHER_BEGINNING,
        5: OTHER_BEGINNING,  # rejected ends with the user's turn
        6: "two answers are the same",
        7: "the rejected answer is empty",
        8: "only one of chosen and rejected is there",
    }),
    ("allenai/olmo-2-0425-1b-preference-mix", "preference", "train", 4, {3: OTHER_BEGINNING, 4: EMPTY_CHATS}),
    ("allenai/RLVR-GSM", "prompt", "train", 4, {
        4: "ground_truth '' is no answer, which gsm compares with",
        5: "dataset None is no verifier's name",
    }),
    ("allenai/RLVR-MATH", "prompt", "train", 6, {3: "ground_truth None is no answer, which math compares with"}),
    ("allenai/RLVR-IFeval", "prompt", "train", 4, {
        4: "function 'validate_smell' is none of",
        5: "is neither JSON nor a Python literal",
        6: "must have the fields N and no others",
    }),
    ("other/RLVR-IFeval-as-lists", "prompt", "train", 1, {1: "ground_truth has 2 values", 2: "ground_truth has 0 values"}),
    ("allenai/IF_multi_constraints_upto5", "prompt", "train", 3, {
        3: "the ids of instructions and their arguments are not lists of one length",
        4: "instruction {'id': 'smell:tar'} has none of the ids",
    }),
    ("allenai/RLVR-GSM-MATH-IF-Mixed-Constraints", "prompt", "train", 8, {
        7: "assert nothing, so every program would pass",
        8: "ground_truth ' ' is no answer, which math compares with",
        9: "message 0 (user) is empty",
    }),
    ("openbmb/UltraFeedback", "prompt", "train", 3, {3: "message 0 (user) is empty"}),
    (CLEANED, "prompt", "train_prefs", 2, {2: "message 0 (user) is empty"}),
    (BINARIZED, "preference", "train_prefs", 2, {
        2: "chosen has the score 3.0, below rejected's 5.5",
        3: "two answers are the same",
        4: "the answer is empty",
    }),
    (BINARIZED, "conversation", "train_sft", 2, {}),
    ("proj-persona/PersonaHub", "prompt", "train", 12, {6: "message 0 (user) is empty"}),
]  # fmt: skip
FIELDS = {"proj-persona/PersonaHub": {"config": "persona", "columns": {"prompt": "persona"}}}
"""Data set → what its source must say besides."""
BBH = sorted(path.name for path in (HUB / "datasets" / "lukaemon" / "bbh").iterdir() if path.is_dir())
SUITES: list[tuple[str, str, str | list[str] | None, str, int, int]] = [
    ("openai/gsm8k", "gsm8k", "main", "test", 8, 0),
    ("EleutherAI/hendrycks_math", "minerva_math", ["algebra", "counting_and_probability", "geometry", "intermediate_algebra",
                                                   "number_theory", "prealgebra", "precalculus"], "test", 14, 0),
    ("evalplus/humanevalplus", "humanevalplus", None, "test", 8, 0),
    ("cais/mmlu", "mmlu", "all", "test", 8, 0),
    ("akariasai/PopQA", "popqa", None, "test", 8, 0),
    ("truthfulqa/truthful_qa", "truthfulqa", "multiple_choice", "validation", 8, 0),
    ("lukaemon/bbh", "bbh", BBH, "test", 27, 0),
    ("EleutherAI/drop", "drop", None, "validation", 8, 0),
    ("lighteval/agi_eval_en", "agieval", ["aqua_rat", "logiqa-en", "lsat-ar", "lsat-lr", "lsat-rc", "sat-en", "sat-math"], "train", 8, 1),
    ("TIGER-Lab/MMLU-Pro", "mmlu_pro", None, "test", 8, 0),
    ("Idavidrein/gpqa", "gpqa", "gpqa_main", "train", 8, 0),
    ("WillHeld/deepmind-math", "deepmind_math", None, "test", 9, 0),
]  # fmt: skip
"""(data set, form, configurations, split, items, rows without a choice to make)"""


def read(mirror: Path, monkeypatch: pytest.MonkeyPatch, repo: str, record: RecordType, split: Any, **changes: Any) -> Loaded:
    monkeypatch.setenv("PEDIGREE_HUB", str(mirror))
    given = {"type": "hub", "repo": repo, "revision": "a" * 40, "split": split, "max_bad_rows": 12, **FIELDS.get(repo, {}), **changes}
    return load(Hub.model_validate(given), record, None, Outside(check_verifier=check))


def of(repo: str) -> Case:
    return next(case for case in CASES if case[0] == repo)


def rows_of(monkeypatch: pytest.MonkeyPatch, repo: str) -> list[dict[str, Any]]:
    _, record, split, *_ = of(repo)
    return read(HUB, monkeypatch, repo, record, split).rows


def as_parquet(repo: str, folder: Path) -> Path:
    """The same data set with its files in Parquet, as most of the real ones are stored."""
    target = shutil.copytree(HUB / "datasets" / repo, folder / "datasets" / repo)
    card = target / "README.md"
    card.write_text(card.read_text().replace(".jsonl", ".parquet"))
    for file in list(target.rglob("*.jsonl")):
        write_file(file.with_suffix(".parquet"), read_rows(file))
        file.unlink()
    return folder


@pytest.mark.parametrize("stored", nightly_after(1, ["jsonl", "parquet"]))
@pytest.mark.parametrize("case", CASES, ids=[f"{repo.partition('/')[2]}-{record}" for repo, record, *_ in CASES])
def test_every_row_is_taken_or_refused_with_its_reason(tmp_path, monkeypatch, case, stored):
    repo, record, split, usable, refused = case
    loaded = read(HUB if stored == "jsonl" else as_parquet(repo, tmp_path), monkeypatch, repo, record, split)
    assert len(loaded.rows) == usable
    assert [row.place for row in loaded.bad] == [f"{repo}/{split}[{number}]" for number in refused]
    for row, reason in zip(loaded.bad, refused.values(), strict=True):
        assert reason in row.reason, row
    message = rf"{len(refused)} malformed rows of {usable + len(refused)}"
    with pytest.raises(PedigreeError, match=message) if refused else nullcontext():
        read(HUB, monkeypatch, repo, record, split, max_bad_rows=max(len(refused) - 1, 0))


def test_what_an_unpacker_says_of_a_damaged_file_is_told_of_the_data_set(tmp_path, monkeypatch):
    """pyarrow says it by an OSError without a number, as if the disk failed. Before, its rows are those of JSONL."""
    repo = "allenai/tulu-3-sft-mixture"
    whole = read(as_parquet(repo, tmp_path / "whole"), monkeypatch, repo, "conversation", "train")
    assert whole == read(HUB, monkeypatch, repo, "conversation", "train")
    for file in as_parquet(repo, tmp_path).rglob("*.parquet"):
        parquet.write_table(Table.from_pylist([{"id": f"row {number}"} for number in range(5000)]), file, compression="zstd")
        data = bytearray(file.read_bytes())
        data[200:400] = b"\xff" * 200
        file.write_bytes(data)
    with pytest.raises(StoreError, match=rf"hub data set {repo}: "):
        read(tmp_path, monkeypatch, repo, "conversation", "train")


@pytest.mark.parametrize(("error", "kept"), [
    (OSError(errno.EIO, "Input/output error"), True),
    (OSError(errno.ENOSPC, "No space left on device"), True),
    (OSError("Corrupt snappy compressed data."), False),
    (gzip.BadGzipFile("Not a gzipped file"), False),
    (EOFError("Compressed file ended before the end-of-stream marker was reached"), False),
    (zlib.error("Error -3 while decompressing data"), False),
    (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
])  # fmt: skip
def test_a_failing_disk_is_no_fault_of_the_data_set(tmp_path, error, kept):
    with (
        pytest.raises(type(error) if kept else StoreError) as told,
        hub._reading(hub.Repository("dataset", "lab/sums", "a" * 40), tmp_path),
    ):
        raise error
    assert (told.value is error) == kept and (kept or str(told.value).startswith("hub data set lab/sums: "))


def test_every_fixture_is_small_and_has_a_case():
    files = list(HUB.rglob("*.jsonl"))
    assert {"/".join(file.relative_to(HUB).parts[1:3]) for file in files} == {repo for repo, *_ in (*CASES, *SUITES)}
    assert all(len(file.read_text().splitlines()) <= 13 for file in files)


@pytest.mark.parametrize("stored", nightly_after(1, ["jsonl", "parquet"]))
@pytest.mark.parametrize(("repo", "form", "config", "split", "count", "not_asked"), SUITES, ids=[form for _, form, *_ in SUITES])
def test_every_row_of_a_benchmark_is_an_item_of_its_form(tmp_path, monkeypatch, repo, form, config, split, count, not_asked, stored):
    monkeypatch.setenv("PEDIGREE_HUB", str(HUB if stored == "jsonl" else as_parquet(repo, tmp_path)))
    given = {"repo": repo, "revision": "a" * 40, "config": config, "split": split}
    source = Hub(type="hub", **given, config_as="task" if form in ("agieval", "bbh") else None)
    loaded = load_items(source, load_form(form), form, Outside(check_verifier=check))
    assert (len(loaded.rows), loaded.bad) == (count, []) and sum(loaded.left_out.values()) == not_asked
    assert len({item["messages"][-1]["content"] for item in loaded.rows}) == count


def test_equal_rows_of_a_mixture_all_stay(monkeypatch):
    first, second = (row for row in rows_of(monkeypatch, "allenai/tulu-3-sft-mixture") if row["messages"][0]["content"] == "Who made you?")
    assert second == first | {"id": f"{first['id']}-2"}  # upsampled on purpose


def test_ratings_of_a_judge_are_no_scores(monkeypatch):
    rows = rows_of(monkeypatch, "allenai/olmo-2-0425-1b-preference-mix")
    assert {row["source"] for row in rows} == {"olmo-2-0425-1b-preference-mix"}
    assert all(one["score"] is None for row in rows for one in row["answers"])


RIGHT = {
    "allenai/RLVR-GSM": ["So the answer is 3.", "1,234 bricks", "It is -5", "2.5"],
    "allenai/RLVR-MATH": ["$\\boxed{0.5}$", "The final answer is $3$.", "\\boxed{(0,1)}", "\\boxed{50}", "\\boxed{3}", "\\boxed{2}"],
    "allenai/RLVR-IFeval": ["small letters only", "* a\n* b\n* c", "yes or no", "rail and station"],
    "other/RLVR-IFeval-as-lists": ["small letters only"],
    "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints": ["13", "11", "\\boxed{1024}", "\\boxed{4}", "* a\n* b", "small letters", "2", "14"],
}


@pytest.mark.integration
@pytest.mark.parametrize("repo", RIGHT)
def test_right_answers_to_verifiable_prompts_score_one(monkeypatch, repo):
    rows = rows_of(monkeypatch, repo)
    for row, answer in zip(rows, RIGHT[repo], strict=True):
        assert verify(row["verifier"], answer).score == 1.0, (row, answer)
        assert verify(row["verifier"], "NOTHING OF THE KIND").score == 0.0, row


def test_few_shot_prefixes_stay_where_they_are(monkeypatch):
    rows = rows_of(monkeypatch, "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints")
    assert rows[0]["messages"][0]["content"].startswith("Question: A box holds 3 pens.")  # in the text of the only turn
    assert [one["role"] for one in rows[1]["messages"]] == ["user", "assistant", "user"]  # or as turns
    assert Counter(row["verifier"]["name"] for row in rows) == {"gsm": 4, "math": 2, "constraint": 2}


def test_prompts_of_pairs_need_no_good_pair_where_the_column_is_chosen(monkeypatch):
    assert len(read(HUB, monkeypatch, BINARIZED, "prompt", "train_gen").bad) == 2
    loaded = read(HUB, monkeypatch, BINARIZED, "prompt", ["train_gen", "test_gen"], columns={"prompt": "prompt"})
    assert len(loaded.rows) == 6 and not loaded.bad
    chats = read(HUB, monkeypatch, BINARIZED, "prompt", "train_gen", columns={"messages": "messages"})  # which end with the user's turn
    assert [row["messages"] for row in chats.rows] == [row["messages"] for row in loaded.rows[:5]]
    loaded = read(HUB, monkeypatch, BINARIZED, "preference", "train_prefs")
    assert [[one["score"] for one in row["answers"]] for row in loaded.rows] == [[8.0, 4.0], [6.0, 6.0]]  # a tie stays a pair
