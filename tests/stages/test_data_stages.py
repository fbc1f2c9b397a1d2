"""prepare_data, decontaminate, pair, select: from artifacts to artifacts."""

import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter

import pytest
from data_lab import publish, rows_of, run_stage, seal
from models import IMPORTS, a_job, config_of
from pyarrow import Table, parquet
from row_reading import read_rows

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.configs.rows.overlap_criteria import Decontaminate
from pedigree.data.artifacts.artifacts import LINEAGE_SCHEMA, RUN_SCHEMA, Artifact, Input, write_json, write_rows
from pedigree.data.contamination.decontamination import Comparison, Index
from pedigree.data.records import columns, records
from pedigree.data.sources.sources import Outside, problem_of_first_rows
from pedigree.stages.decontaminate import run as decontaminate
from pedigree.stages.evaluate.run import split_of
from pedigree.stages.job.failures import StageError

SUITE = {
    "record": "item",
    "task": "sums",
    "sources": [{"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 12, "seed": 1}],
}
ROWS = {
    "record": "conversation",
    "sources": [
        {"type": "leaks", "count": 6, "seed": 2},
        {"type": "arithmetic", "operations": ["add", "subtract"], "digits": [1], "count": 100, "seed": 3},
    ],
    "filters": [{"type": "exact_duplicates"}],
}


def evidence(artifact, name):
    return json.loads((artifact.evidence / name).read_text())


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return run_stage(tmp_path_factory.mktemp("data") / "suite", "prepare_data", SUITE)


@pytest.fixture(scope="module")
def raw(tmp_path_factory, suite):
    return run_stage(tmp_path_factory.mktemp("data") / "raw", "prepare_data", ROWS, leak_from={"suite": suite})


@pytest.fixture(scope="module")
def clean(tmp_path_factory, suite, raw):
    return run_stage(tmp_path_factory.mktemp("data") / "clean", "decontaminate", {}, data=raw, benchmarks={"suite": suite})


def test_every_row_that_went_in_is_kept_or_dropped_with_a_reason(raw):
    counts = evidence(raw, "counts.json")
    assert counts["read"] == 106 == counts["kept"] + sum(counts["drops"].values())
    for part in counts["per_source"]:
        assert part["in"] == part["kept"] + sum(part["dropped"].values())
    drops = read_rows(raw.evidence / "drops.jsonl")
    assert Counter(drop["reason"] for drop in drops) == counts["drops"]
    assert len(rows_of(raw)) == counts["kept"] == raw.record.metrics["rows"]


def test_preparing_twice_gives_the_same_bytes_and_another_seed_another_order_of_the_same_rows(tmp_path, suite, raw):
    again = run_stage(tmp_path / "again", "prepare_data", ROWS, leak_from={"suite": suite})
    assert again.record.content == raw.record.content and again.record.metrics == raw.record.metrics
    other = run_stage(tmp_path / "other", "prepare_data", ROWS | {"seed": 1}, leak_from={"suite": suite})
    assert [row["id"] for row in rows_of(other)] != [row["id"] for row in rows_of(raw)]
    assert {row["id"] for row in rows_of(other)} == {row["id"] for row in rows_of(raw)}


def test_where_a_data_stage_runs_changes_no_byte(tmp_path, suite, raw, clean):
    """Neither the order of sets, nor time zone, locale and threads; compared with this process's own."""
    code = f"""
from pathlib import Path
from data_lab import run_stage
from pedigree.data.artifacts.artifacts import open_artifact
suite, raw = {{"suite": open_artifact(Path({str(suite.path)!r}))}}, open_artifact(Path({str(raw.path)!r}))
for made in (run_stage(Path("raw"), "prepare_data", {ROWS}, leak_from=suite),
             run_stage(Path("clean"), "decontaminate", {{}}, data=raw, benchmarks=suite)):
    print(made.record.content)
"""
    place = {"PYTHONHASHSEED": "4242", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "OMP_NUM_THREADS": "7", "PYTHONPATH": IMPORTS}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | place, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split()[-2:] == [raw.record.content, clean.record.content], done.stderr


def test_bad_rows_within_the_budget_are_listed_in_the_evidence_and_counted(tmp_path):
    verifiable = {"messages": [{"role": "user", "content": "1 + 1?"}], "dataset": "gsm8k", "ground_truth": "2"}
    unknown = {"messages": [{"role": "user", "content": "Bees?"}], "dataset": "ifeval", "ground_truth": '{"func_name": "smell"}'}
    write_rows(tmp_path / "sums.jsonl", [verifiable, {"messages": []}, unknown])
    config = {"record": "prompt", "sources": [{"type": "files", "path": "sums.jsonl", "max_bad_rows": 2}]}
    made = run_stage(tmp_path / "made", "prepare_data", config, files={"sums.jsonl": tmp_path / "sums.jsonl"})
    assert len(rows_of(made)) == made.record.metrics["rows"] == 1 and made.record.metrics["bad_rows"] == 2
    (source,) = evidence(made, "counts.json")["per_source"]
    assert (source["in"], source["left_out"], source["kept"]) == (1, {"malformed": 2}, 1)
    first, second = read_rows(made.evidence / "bad_rows.jsonl")
    assert first == {"source": "sums", "place": "sums.jsonl:2", "reason": "there are no messages", "text": '{"messages": []}'}
    assert second["place"] == "sums.jsonl:3" and second["reason"].startswith("function 'smell' is none of")  # of verifiers too
    config["sources"][0]["max_bad_rows"] = 0.34
    with pytest.raises(PedigreeError, match=r"(?s)2 malformed rows of 3, and max_bad_rows 0.34 allows 1.*sums.jsonl:3: function 'smell'"):
        run_stage(tmp_path / "refused", "prepare_data", config, files={"sums.jsonl": tmp_path / "sums.jsonl"})


def test_an_empty_file_is_no_fault_of_others_in_a_folder_and_a_byte_order_mark_is_no_part_of_a_row(tmp_path):
    row = json.dumps({"prompt": "Two?", "completion": "2"}).encode()
    files = {"set/blank.jsonl": b"\n", "set/none.jsonl": b"", "set/x.jsonl": b"\xef\xbb\xbf" + row + b"\r\n", "torn.jsonl": b"{"}
    (tmp_path / "set").mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    given = {name: tmp_path / name for name in ("set", "torn.jsonl")}
    config = {"record": "conversation", "sources": [{"type": "files", "path": "set"}]}
    (one,) = rows_of(run_stage(tmp_path / "made", "prepare_data", config, files=given))
    assert one["messages"] == [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"}]
    (source,) = config_of("prepare_data", **config).sources
    assert problem_of_first_rows(config_of("prepare_data", **config), source, Outside(files=given)) is None
    sources = [{"type": "files", "path": "torn.jsonl", "max_bad_rows": 1}]
    with pytest.raises(StageError, match=r"no row is left of 0 \(dropped: {}\), and 1 more are malformed"):
        run_stage(tmp_path / "nothing", "prepare_data", {**config, "sources": sources}, files=given)


@pytest.mark.parametrize("data", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_called_empty(tmp_path, data):
    files = {name: tmp_path / name for name in ("a.jsonl", "b.json", "c.parquet")}
    files["a.jsonl"].write_bytes(data)
    files["b.json"].write_bytes(data or b'{"data": []}')
    parquet.write_table(Table.from_pylist([]), files["c.parquet"])
    files["full.jsonl"] = tmp_path / "full.jsonl"
    write_rows(files["full.jsonl"], [{"prompt": "Two?", "completion": "2"}])
    for name in ("a.jsonl", "b.json", "c.parquet"):
        for others in ([], ["full.jsonl"]):
            config = {"record": "conversation", "sources": [{"type": "files", "path": one} for one in (*others, name)]}
            with pytest.raises(PedigreeError, match=rf"^{name[0]}: empty, without any row"):
                run_stage(tmp_path / "made" / name / f"{len(others)}", "prepare_data", config, files=files)


def test_rows_that_a_rule_drops_are_counted_by_their_fault_beside_those_that_filters_drop(tmp_path):
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    rows = [{"messages": turns}, {"messages": turns[1:]}, {"messages": [turns[0], *turns[2:]]}, {"messages": turns[:3]}, {"messages": []}]
    rows += [{"messages": [turns[0], {"role": "system", "content": "Be brief."}, *turns[1:]]}] * 2
    write_rows(tmp_path / "x.jsonl", rows)
    rules = {"assistant_first": "drop", "same_role": "drop", "user_last": "cut", "late_system": "join"}
    config = {"record": "conversation", "sources": [{"type": "files", "path": "x.jsonl", "max_bad_rows": 1, "out_of_turn": rules}]}
    made = run_stage(tmp_path / "made", "prepare_data", config, files={"x.jsonl": tmp_path / "x.jsonl"})
    assert sorted(len(row["messages"]) for row in rows_of(made)) == [2, 4, 4, 4]
    metrics, faults = made.record.metrics, {"assistant_first": 1, "same_role": 1}
    assert (metrics["dropped"], metrics["bad_rows"]) == (faults, 1)
    (source,) = evidence(made, "counts.json")["per_source"]
    assert source["left_out"] == faults | {"malformed": 1}
    assert metrics["out_of_turn"] == source["out_of_turn"] == {"user_last: cut": 1, "late_system: join": 2}  # changed, not left out
    assert [row.get("out_of_turn") for row in read_rows(made.evidence / "bad_rows.jsonl")] == ["assistant_first", "same_role", None]


def test_a_row_left_out_by_id_goes_with_its_copies_and_its_text_and_a_slip_of_the_pen_is_told(tmp_path):
    rows = [{"prompt": "Say it.", "response": answer} for answer in ("Once.", "Twice.", "Once.", "once. ")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"record": "conversation", "sources": [{"type": "files", "path": "rows.jsonl"}]}
    files = {"rows.jsonl": tmp_path / "rows.jsonl"}
    named = {row["messages"][-1]["content"]: row["id"] for row in rows_of(run_stage(tmp_path / "all", "prepare_data", config, files))}
    wanted = named["Once."].removesuffix("-2")
    filters = [{"type": "exact_duplicates"}, {"type": "ids", "ids": [wanted]}]
    made = run_stage(tmp_path / "less", "prepare_data", {**config, "filters": filters}, files)
    assert [row["id"] for row in rows_of(made)] == [named["Twice."]]  # the copy in small letters stays dropped
    gone = read_rows(made.path / "evidence/drops.jsonl")
    assert {(drop["id"], drop["reason"]) for drop in gone} == {
        (wanted, "ids"), (f"{wanted}-2", "exact_duplicates"), (named["once. "], "exact_duplicates"),
    }  # fmt: skip
    assert {drop["text"] for drop in gone} == {""}
    word, later = {"type": "keywords", "words": ["once"]}, named["once. "]
    for first, name, hidden in ((word, wanted, {wanted: "", f"{wanted}-2": ""}), (filters[0], later, {later: f"same text as {wanted}"})):
        both = {**config, "filters": [first, {"type": "ids", "ids": [name]}]}  # what is named is gone before
        gone = read_rows(run_stage(tmp_path / first["type"], "prepare_data", both, files).path / "evidence/drops.jsonl")
        assert {drop["id"]: drop["evidence"] for drop in gone if not drop["text"]} == hidden and len(gone) > len(hidden)
    with pytest.raises(StageError, match=f"1 ids of a filter match no row, e.g. '{wanted[:-1]}'"):
        run_stage(tmp_path / "slip", "prepare_data", {**config, "filters": [{"type": "ids", "ids": [wanted[:-1]]}]}, files)


def test_decontamination_removes_leaks_and_equal_problems_and_nothing_else(suite, raw, clean):
    asked = {item["messages"][0]["content"] for item in rows_of(suite)}
    expected = [row for row in rows_of(raw) if not row["source"].startswith("leak") and row["messages"][0]["content"] not in asked]
    assert rows_of(clean) == expected
    assert clean.record.metrics["planted_leaks"] == clean.record.metrics["leaks_found"] == 6
    manifest = read_rows(clean.evidence / "manifest.jsonl")
    assert {line["id"] for line in manifest} == {row["id"] for row in rows_of(raw)} - {row["id"] for row in expected}
    items = {item["id"] for item in rows_of(suite)}
    assert all(line["item"] in items and line["score"] == 1.0 and line["task"] == "sums" for line in manifest)
    assert clean.record.metrics["benchmarks"]["suite"]["items_overlapped"] == len({line["item"] for line in manifest})


def test_processes_and_batches_change_no_byte_of_a_decontaminated_set(tmp_path, suite, raw, monkeypatch):
    """Batches are the rows that were written together."""
    real, who = Index.overlaps, tmp_path / "who"

    def noted(index, rows, threshold, least):
        with who.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return real(index, rows, threshold, least)

    monkeypatch.setattr(Index, "overlaps", noted)
    made = {}
    for threads, batch, many in ((1, 1000, 10_000), (2, 1000, 10_000), (3, 40, 1)):
        folder = tmp_path / f"{threads}-{batch}"
        with monkeypatch.context() as patched:
            patched.setattr(columns, "ROWS_PER_GROUP", batch)
            patched.setattr(columns, "ROWS_PER_FILE", 2 * batch)
            given = publish(folder / "raw", "conversation", rows_of(raw))
        monkeypatch.setattr("pedigree.data.records.scattered.MANY", many)
        who.write_text("")
        clean = run_stage(folder / "clean", "decontaminate", {}, data=given, benchmarks={"suite": suite}, threads=threads)
        made[clean.record.content, (clean.evidence / "manifest.jsonl").read_bytes(), (clean.evidence / "report.json").read_bytes()] = folder
        pids = set(map(int, who.read_text().split()))
        assert (os.getpid() in pids) == (threads == 1 or many > 1) and len(pids) <= threads
    assert len(made) == 1 and b'"score"' in next(iter(made))[1]


def test_hits_have_no_copies_of_items_whichever_process_finds_them(tmp_path, suite, raw, monkeypatch):
    """Items may be long, and are as many times in memory otherwise as rows are like them."""
    sent, real = tmp_path / "sent", decontaminate.search

    def noted(data, look, *rest):
        def noting(place, rows):
            found = look(place, rows)
            with sent.open("ab") as stream:
                stream.write(pickle.dumps(found))
            return found

        return real(data, noting, *rest)

    monkeypatch.setattr(decontaminate, "search", noted)
    monkeypatch.setattr("pedigree.data.records.scattered.MANY", 1)
    benchmarks = {"suite": [{**item, "examples": "A worked example. " * 1000} for item in rows_of(suite)]}
    config, job = Decontaminate(), a_job(tmp_path / "job", Numerics(threads=2))
    found, _ = decontaminate.compare(Comparison(benchmarks, config), benchmarks, raw, config, job)
    items = {item["id"]: item for item in benchmarks["suite"]}
    overlaps = [overlap for hit in found.hits for overlap in hit.overlaps]
    assert overlaps and all(overlap.item is items[overlap.item["id"]] for overlap in overlaps)
    assert b"worked example" not in sent.read_bytes()


def test_the_turns_that_are_asked_for_are_searched_and_recorded(tmp_path, suite):
    item = rows_of(suite)[0]["messages"][0]["content"]
    rows = [
        {"id": name, "source": "s", "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for name, asked, answer in (("other", "Tell me of bees.", "They hum."), ("leak", "Ask me something.", f"Well. {item}"))
    ]
    data = publish(tmp_path / "rows", "conversation", rows)
    for turns, left in ((["user"], 2), (["system", "user", "assistant"], 1)):
        clean = run_stage(tmp_path / str(left), "decontaminate", {"turns": turns}, data=data, benchmarks={"suite": suite})
        assert len(rows_of(clean)) == left
        assert clean.record.metrics["turns"] == evidence(clean, "report.json")["turns"] == turns


def test_a_setting_that_might_leave_copies_in_is_refused():
    for setting, bound in (
        ({"threshold": 0.91}, "less than or equal to 0.9"),
        ({"ngram": 14}, "less than or equal to 13"),
        ({"turns": ["system", "assistant"]}, "add user"),
        ({"turns": []}, "add user"),
    ):
        with pytest.raises(ValueError, match=bound):
            Decontaminate.model_validate(setting)


def test_a_source_of_ones_own_is_no_planted_leak_whatever_it_is_called(tmp_path, suite):
    write_rows(tmp_path / "leak-detection.jsonl", [{"prompt": "Is the tap leaking?", "completion": "Yes."}])
    config = {"record": "conversation", "sources": [{"type": "files", "path": "leak-detection.jsonl"}]}
    data = run_stage(tmp_path / "data", "prepare_data", config, files={"leak-detection.jsonl": tmp_path / "leak-detection.jsonl"})
    made = run_stage(tmp_path / "clean", "decontaminate", {}, data=data, benchmarks={"suite": suite})
    assert rows_of(made) == rows_of(data) and rows_of(data)[0]["source"] == "leak-detection"
    assert [one.record.metrics["planted_leaks"] for one in (data, made)] == [0, 0]


def test_a_further_benchmark_that_removes_nothing_changes_no_content_and_explains_no_leak(tmp_path, suite, raw, clean):
    far = SUITE | {"sources": [{"type": "arithmetic", "operations": ["multiply"], "digits": [2], "count": 5, "seed": 1}]}
    other = run_stage(tmp_path / "far", "prepare_data", far)
    two = run_stage(tmp_path / "two", "decontaminate", {}, data=raw, benchmarks={"suite": suite, "far": other})
    assert clean.record.content == two.record.content
    assert two.record.metrics["benchmarks"]["far"] == {"items": 5, "items_overlapped": 0, "share_overlapped": 0.0, "rows_removed": 0}
    with pytest.raises(StageError, match="6 planted leaks were not removed"):
        run_stage(tmp_path / "x", "decontaminate", {}, data=raw, benchmarks={"far": other})


def test_the_gate_counts_items_and_not_rows(tmp_path, suite, raw, clean):
    """All 12 items are sums of one digit, of which the 100 rows hold many."""
    share = clean.record.metrics["benchmarks"]["suite"]
    exact = share["share_overlapped"]
    assert 0.5 <= exact == share["items_overlapped"] / 12
    run_stage(tmp_path / "b", "decontaminate", {"max_contaminated_share": exact}, data=raw, benchmarks={"s": suite})
    with pytest.raises(StageError, match="of 12 items of s"):
        run_stage(tmp_path / "c", "decontaminate", {"max_contaminated_share": exact - 0.01}, data=raw, benchmarks={"s": suite})


def judgment(prompt, index, text, score, policy="p"):
    return {
        "id": f"{prompt}/{policy}/{index}", "prompt_id": prompt, "source": "s", "messages": [{"role": "user", "content": prompt}],
        "policy": policy, "policy_content": "c", "on_policy": False, "text": text, "finish_reason": "stop", "response_length": 3,
        "verifier_score": score, "rewards": {}, "reward": None, "disagreement": None, "score": score,
    }  # fmt: skip


def paired(folder, rows, **config):
    return run_stage(folder, "pair", config, judgments=publish(folder.with_name(folder.name + "_in"), "judgment", rows))


ANSWERS = {
    "better": [("good", 1.0), ("bad", -0.5), ("so", 0.0)],
    "tie": [("a", 0.3), ("b", 0.3)],
    "twins": [("same", 1.0), ("same", 1.0)],
    "alone": [("a", 1.0)],
    "unscored": [("a", 1.0), ("b", None)],
    "near": [("a", 0.2), ("b", 0.1)],
    "silent": [("", 1.0), ("x", 0.0)],
    "shy": [("x", 1.0), ("", 0.0)],
}
JUDGMENTS = [judgment(prompt, number, *answer) for prompt, answers in ANSWERS.items() for number, answer in enumerate(answers)]


def test_best_is_paired_with_worst_and_every_other_prompt_has_its_reason(tmp_path):
    made = paired(tmp_path / "x", JUDGMENTS, min_gap=0.2)
    assert [(row["id"], told(row), row["strength"]) for row in rows_of(made)] == [
        ("better/best_vs_worst", [("good", 1.0), ("bad", -0.5)], None),
        ("shy/best_vs_worst", [("x", 1.0), ("", 0.0)], None),
    ]
    assert made.record.metrics["mean_margin"] == 1.25 and made.record.metrics["exchanged"] == 0
    drops = {"tie": 1, "identical texts": 1, "fewer than two scored answers": 2, "gap below min_gap": 1, "empty best answer": 1}
    truncated = {"read": 0, "best": 0, "worse": 0}
    counts = {"read": 16, "unscored": 1, "truncated": truncated, "prompts": 8, "kept": 2, "drops": drops}
    assert evidence(made, "counts.json") == counts
    with pytest.raises(StageError, match=r"2 preferences < min_pairs 4 from 8 prompts \(.*'tie': 1"):
        paired(tmp_path / "y", JUDGMENTS, min_gap=0.2, min_pairs=4)


def told(row):
    return [(answer["text"], answer["score"]) for answer in row["answers"]]


def test_a_ranked_list_has_every_text_once_the_best_scored_first(tmp_path):
    rows = [*JUDGMENTS, judgment("better", 3, "so", 0.5), judgment("better", 4, "mute", None), judgment("better", 5, "ha", 0.5)]
    made = paired(tmp_path / "x", rows, strategy="ranked", min_gap=0.2)
    better, shy = rows_of(made)
    assert (better["id"], shy["id"]) == ("better/ranked", "shy/ranked")
    ranked = told(better)
    assert ranked[0] == ("good", 1.0) and ranked[3] == ("bad", -0.5) and set(ranked[1:3]) == {("so", 0.5), ("ha", 0.5)}
    assert made.record.metrics["rows"] == 2 and made.record.metrics["answers"] == 6


def test_label_noise_exchanges_texts_by_hash_and_the_scores_stay(tmp_path):
    rows = [judgment(f"q{number}", index, f"{number}/{index}", float(index)) for number in range(400) for index in range(2)]
    clean, noisy = paired(tmp_path / "a", rows), paired(tmp_path / "b", rows, label_noise=0.25)
    flipped = 0
    for one, other in zip(rows_of(clean), rows_of(noisy), strict=True):
        assert [score for _, score in told(other)] == [1.0, 0.0]
        flipped += told(one) != told(other)
        assert {text for text, _ in told(one)} == {text for text, _ in told(other)}
    assert 70 <= flipped <= 130  # 100 are due, with a standard deviation of 8.7
    assert noisy.record.metrics["exchanged"] == flipped and noisy.record.metrics["mean_margin"] == 1.0
    some = paired(tmp_path / "c", rows[:400], label_noise=0.25)
    assert rows_of(some) == [row for row in rows_of(noisy) if row["messages"][0]["content"] in {f"q{number}" for number in range(200)}]
    more = paired(tmp_path / "d", rows, label_noise=0.5)
    assert sum(told(one) != told(other) for one, other in zip(rows_of(clean), rows_of(more), strict=True)) > 160
    with pytest.raises(ValueError, match=r"label_noise 0.1 swaps the answers of pairs, but strategy is ranked"):
        paired(tmp_path / "e", rows, label_noise=0.1, strategy="ranked")


@pytest.mark.parametrize("seed", range(2))
def test_neither_the_order_of_judgments_nor_rows_of_other_prompts_change_a_pair(tmp_path, seed):
    draw, scores = random.Random(seed), (0.0, 0.5, 1.0, None)
    rows = [judgment(f"q{number}", index, draw.choice("abcd"), draw.choice(scores)) for number in range(40) for index in range(4)]
    whole = paired(tmp_path / "a", rows)
    assert paired(tmp_path / "b", draw.sample(rows, len(rows))).record.content == whole.record.content
    some = rows_of(paired(tmp_path / "c", [row for row in rows if row["prompt_id"] not in ("q3", "q17")]))
    assert some == [row for row in rows_of(whole) if not row["id"].startswith(("q3/", "q17/"))]


def test_among_equally_good_answers_the_seed_decides_and_not_the_place(tmp_path):
    rows = [judgment(f"q{number}", index, f"good {index}", 1.0) for number in range(60) for index in range(4)]
    rows += [judgment(f"q{number}", 4, "bad", 0.0) for number in range(60)]
    chosen = Counter(row["answers"][0]["text"] for row in rows_of(paired(tmp_path / "a", rows)))
    assert set(chosen) == {f"good {index}" for index in range(4)} and max(chosen.values()) < 30
    assert paired(tmp_path / "b", rows, seed=1).record.content != paired(tmp_path / "c", rows, seed=2).record.content


def policy(folder, weights):
    (folder / "payload" / "sub").mkdir(parents=True)
    (folder / "payload" / "model.safetensors").write_text(weights)
    (folder / "payload" / "sub" / "x").write_text("x")
    return seal(folder, "by_hand", "policy", {}, [], {})


def scores(folder, policies, means, split="dev"):
    table = {
        label: {"mean": sum(tasks.values()) / len(tasks), "tasks": {t: {"mean": m} for t, m in tasks.items()}}
        for label, tasks in means.items()
    }
    write_json(folder / "payload" / "scores.json", {"policies": table})
    edges = [Input(port="policies", label=label, content=made.record.content, producer="0" * 64) for label, made in policies.items()]
    return seal(folder, "evaluate", "scores", {}, edges, {"split": split})


@pytest.fixture
def policies(tmp_path):
    return {label: policy(tmp_path / label, label) for label in ("a", "b", "c")}


MEANS = {"a": {"sums": 0.5, "words": 0.1}, "b": {"sums": 0.5, "words": 0.9}, "c": {"sums": 0.1, "words": 0.2}}


def test_the_best_on_the_task_is_copied_whole_and_the_earlier_of_equals_wins(tmp_path, policies):
    table = scores(tmp_path / "scores", policies, MEANS)
    by_task = run_stage(tmp_path / "x", "select", {"task": "sums"}, candidates=policies, scores=table)
    assert by_task.record.content == policies["a"].record.content
    by_mean = run_stage(tmp_path / "y", "select", {}, candidates=policies, scores=table)
    assert by_mean.record.content == policies["b"].record.content
    assert [entry["candidate"] for entry in evidence(by_mean, "choice.json")["ranking"]] == ["b", "a", "c"]
    renamed = run_stage(tmp_path / "z", "select", {}, candidates={"final": policies["c"]}, scores=table)
    assert renamed.record.metrics["scores"] == {"final": pytest.approx(0.15)}  # it goes by its content
    copied, original = by_task.payload / "model.safetensors", policies["a"].payload / "model.safetensors"
    assert copied.stat().st_ino != original.stat().st_ino


def test_the_best_on_some_tasks_has_the_highest_mean_over_them(tmp_path, policies):
    means = {label: {**tasks, "codes": codes} for (label, tasks), codes in zip(MEANS.items(), (0.0, 0.0, 1.0), strict=True)}
    table = scores(tmp_path / "scores", policies, means)
    chosen = run_stage(tmp_path / "x", "select", {"task": ["sums", "codes"]}, candidates=policies, scores=table)
    assert chosen.record.content == policies["c"].record.content  # 0.55; by sums alone it is the last, by all tasks the second
    assert evidence(chosen, "choice.json")["ranking"][0] == {"candidate": "c", "score": pytest.approx(0.55)}
    with pytest.raises(StageError, match="no score for task 'poems'"):
        run_stage(tmp_path / "y", "select", {"task": ["sums", "poems"]}, candidates=policies, scores=table)


@pytest.mark.parametrize("config", [{}, {"task": ["sums", "words", "codes"]}])
def test_equal_means_are_equal_in_whatever_order_they_are_added(tmp_path, policies, config):
    """0.3 + 0.2 + 0.1 is 0.6 in floats, and 0.1 + 0.2 + 0.3 is more."""
    given = {"a": (0.3, 0.2, 0.1), "b": (0.1, 0.2, 0.3), "c": (0.1, 0.2, 0.2)}
    means = {label: dict(zip(("sums", "words", "codes"), own, strict=True)) for label, own in given.items()}
    table = scores(tmp_path / "scores", policies, means)
    chosen = run_stage(tmp_path / "x", "select", config, candidates=policies, scores=table)
    assert chosen.record.content == policies["a"].record.content


def test_scores_of_other_bytes_or_an_unseen_suite_choose_nothing(tmp_path, policies):
    table = scores(tmp_path / "scores", policies, MEANS)
    retrained = policies | {"b": policy(tmp_path / "b2", "other weights")}
    with pytest.raises(StageError, match=r"candidate b .* was not evaluated in its current version"):
        run_stage(tmp_path / "x", "select", {}, candidates=retrained, scores=table)
    unseen = scores(tmp_path / "unseen", policies, MEANS, split="unseen")
    with pytest.raises(StageError, match="from an unseen suite"):
        run_stage(tmp_path / "y", "select", {}, candidates=policies, scores=unseen)
    with pytest.raises(StageError, match="no score for task 'codes'"):
        run_stage(tmp_path / "z", "select", {"task": "codes"}, candidates=policies, scores=table)


def suites(folder, **splits):
    return {name: seal_suite(folder / name, split) for name, split in splits.items()}


def seal_suite(folder, split):
    messages = [{"role": "user", "content": "How much?"}]
    item = {"id": folder.name, "source": "s", "task": "t", "messages": messages, "verifier": {"name": "gsm8k", "answer": "3"}}
    records.save(folder, "item", [item])
    return seal(folder, "prepare_data", "item", {"split": split}, [], {})


def model(folder, kind, lineage=()):
    """A policy, and what was made on its way: (kind, port, content that it read there)."""
    made = policy(folder, folder.name)
    edges = [(kind, Input(port=port, label="x", content=content, producer="0" * 64)) for kind, port, content in lineage]
    artifacts = {}
    for number, (of, edge) in enumerate(edges):
        record = made.record.model_copy(update={"kind": of, "inputs": (edge,), "key": f"{number:064}"})
        run = {"schema_version": RUN_SCHEMA, "address": "r/x"}
        artifacts[record.id] = {"record": record.model_dump(mode="json"), "run": run}
    write_json(folder / "lineage.json", {"schema_version": LINEAGE_SCHEMA, "artifacts": artifacts, "shared": {}, "patches": {}})
    return Artifact(folder, made.record.model_copy(update={"kind": kind}))


def test_an_unseen_suite_is_one_for_models_that_it_had_no_part_in(tmp_path):
    given = suites(tmp_path, secret="unseen", hidden="unseen", sums="dev")
    secret = given["secret"].record.content
    cleaned = model(tmp_path / "best", "select", [("decontaminate", "benchmarks", secret), ("evaluate", "suites", "f" * 64)])
    ask = {"policies": {"best": cleaned, "base": model(tmp_path / "base", "source_model")}}
    assert split_of(ask | {"suites": {"sums": given["sums"]}}) == "dev"
    assert split_of(ask | {"suites": {"secret": given["secret"], "hidden": given["hidden"]}}) == "unseen"
    with pytest.raises(StageError, match="all dev or all unseen"):
        split_of(ask | {"suites": given})
    with pytest.raises(StageError, match="sft comes from sft and is not frozen"):
        split_of({"policies": {"sft": model(tmp_path / "sft", "sft")}, "suites": {"secret": given["secret"]}})
    for kind, port in (("evaluate", "suites"), ("prepare_data", "leak_from")):
        used = model(tmp_path / kind, "select", [(kind, port, secret)])
        with pytest.raises(StageError, match=f"secret is not unseen for best: in its lineage a {kind} stage used it as {port} x"):
            split_of({"policies": {"best": used}, "suites": {"secret": given["secret"]}})
