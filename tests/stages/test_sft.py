"""The SFT stage in this process: what it trains on, what it drops, what it logs."""

import json
import math
import re

import models
import pytest
from row_reading import read_rows

from pedigree.configs.language.execution import Numerics
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Conversations, schema
from pedigree.stages.job.failures import StageError
from pedigree.stages.sft import run as sft
from pedigree.stages.training.training_rows import held_together, is_held_out, report_drops, report_rows

SFT = {"global_batch": 4, "max_length": 96, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}


def two_turns(count, *marks):
    """Conversations with two questions; the assistant's turns have these marks."""
    rows = []
    for row in models.arithmetic(count):
        messages = [*row["messages"], {"role": "user", "content": "And twice that?"}, {"role": "assistant", "content": "No."}]
        for message, mark in zip(messages[1::2], marks, strict=False):
            message |= {"train": mark}
        rows.append({**row, "messages": messages})
    return rows


def train(folder, policy, rows, numerics=None, **config):
    job = models.a_job(folder / "job", numerics or Numerics(threads=1))
    data = models.dataset(folder / "data", "conversation", rows)
    return sft.run(models.config_of("sft", **{**SFT, **config}), {"policy": {"p": policy}, "data": {"d": data}}, job), job


@pytest.mark.parametrize(("train_on", "said"), [("assistant", ["0", "No."]), ("last_turn", ["No."]), ("marked", ["0"])])
def test_a_document_ends_with_its_last_trained_token(policy, train_on, said):
    """0 + 0 = 0. Nothing learns from what stands behind."""
    chat = Chat(policy.payload)
    ((document,),) = models.units(two_turns(1, True, False), Conversations(train_on), chat)
    tokens = [token for token, trained in zip(document.ids, document.trained, strict=True) if trained]
    end = chat.tokenizer.eos_token
    assert chat.tokenizer.decode(tokens) == "".join(text + end for text in said)
    assert document.trained[-1] and document.ids[-1] == chat.eos_id


def test_rows_without_a_trained_token_are_dropped_and_counted(tmp_path, policy):
    rows = [*two_turns(4, False, True), *({**row, "id": f"{row['id']}-b"} for row in two_turns(3, False, False))]
    metrics, job = train(tmp_path, policy, rows, train_on="marked")
    assert metrics["rows"] == 4 and "3 of 7 rows were dropped (no trained token)" in job.marks
    counts = json.loads((job.evidence / "counts.json").read_text())
    assert counts == {"rows": 7, "kept": 4, "truncated": 0, "dropped": [{"source": "test", "reason": "no trained token", "rows": 3}]}
    assert {drop["id"] for drop in read_rows(job.evidence / "drops.jsonl")} == {"row-0-b", "row-1-b", "row-2-b"}


def test_a_quarter_of_the_rows_vanishes_and_the_record_states_it(tmp_path, policy):
    """15 rows of 20 are short: by 4, that is 4 steps where 5 were expected."""
    rows = models.arithmetic(20)
    for row in rows[:5]:
        row["messages"] = [{"role": "user", "content": "word " * 200}, row["messages"][1]]
    metrics, job = train(tmp_path, policy, rows)
    assert metrics["steps"] == 4
    assert job.marks == ["5 of 20 rows were dropped (longer than max_length 96)"]
    with pytest.raises(StageError, match=r"5 of 20 rows .* refuse_dropped 0\.25: raise max_length \(99 % have at most \d{3}"):
        train(tmp_path / "refused", policy, rows, refuse_dropped=0.25)


@pytest.mark.parametrize(
    ("dropped", "given", "refused", "end"),
    [
        (0, 100, 0.5, "silent"), (0, 0, 0.5, "silent"), (1, 101, 0.5, "silent"), (99, 10_000, 0.5, "silent"),
        (1, 100, 0.5, "noted"), (100, 10_000, 0.5, "noted"), (49, 100, 0.5, "noted"), (1, 3, 0.5, "noted"),
        (50, 100, 0.5, "refused"), (1, 2, 0.5, "refused"), (100, 100, 1.0, "refused"), (99, 100, 1.0, "noted"),
        (7, 100, 0.07, "refused"), (69, 1000, 0.07, "noted"), (1, 1000, 0.001, "refused"),
    ],
)  # fmt: skip
def test_drops_are_noted_from_one_in_a_hundred_on_and_refused_at_the_share_that_the_recipe_states(tmp_path, dropped, given, refused, end):
    """The share is a decimal that a person wrote: 7 of 100 is 0.07, although 0.07 * 100 is more than 7."""
    job, config = models.a_job(tmp_path), models.config_of("sft", **{**SFT, "refuse_dropped": refused})
    said = f"{dropped} of {given} rows were dropped (long)"
    if end == "refused":
        with pytest.raises(StageError, match=re.escape(f"{said}, at least refuse_dropped {refused}: cut, or raise refuse_dropped")):
            report_drops(dropped, given, "rows", "long", "cut", config, job)
    else:
        report_drops(dropped, given, "rows", "long", "cut", config, job)
    assert job.marks == ([said] if end == "noted" else [])


def test_each_reason_is_counted_and_no_remedy_is_advised_that_does_not_help(tmp_path, policy):
    rows = [*two_turns(4, False, True), *({**row, "id": f"{row['id']}-b"} for row in two_turns(4, False, False))]
    with pytest.raises(StageError, match=r"4 of 8 rows were dropped \(no trained token\), .*: change the rows or what is trained of them"):
        train(tmp_path / "a", policy, rows, train_on="marked")
    rows[0]["messages"] = [{"role": "user", "content": "word " * 200}, rows[0]["messages"][1]]
    with pytest.raises(
        StageError, match=r"5 of 8 rows were dropped \(1 longer than max_length 96, 4 no trained token\), .*: raise max_length"
    ):
        train(tmp_path / "b", policy, rows, train_on="marked")


def test_a_global_batch_larger_than_the_data_is_stated(tmp_path, policy):
    metrics, job = train(tmp_path, policy, models.arithmetic(3), epochs=2)
    assert metrics["steps"] == 2 and job.marks == ["global_batch 4 exceeds the 3 rows, so that an epoch is one step: lower it"]


def test_the_accepted_share_is_in_no_key_unless_it_is_set():
    assert "refuse_dropped" not in models.config_of("sft", **SFT).model_dump(mode="json")
    assert models.config_of("sft", **SFT, refuse_dropped=0.6).model_dump(mode="json")["refuse_dropped"] == 0.6


def test_marks_are_asked_for_and_there_are_none(tmp_path, policy):
    with pytest.raises(StageError, match=r"train_on is marked, but none of 4 rows has a turn with `train: true`"):
        train(tmp_path, policy, two_turns(4), train_on="marked")


def test_the_curve_says_what_a_step_was(tmp_path, policy):
    """6 rows by 4 over 2 epochs: steps of 4, 2, 4 and 2 samples."""
    metrics, job = train(tmp_path, policy, models.arithmetic(6), Numerics(threads=1, micro_batch_tokens=64), epochs=2)
    curve = models.curve(job)
    assert [row["samples"] for row in curve] == [4, 2, 4, 2] and [row["epoch"] for row in curve] == [0.5, 1.0, 1.5, 2.0]
    documents = [document for (document,) in models.units(models.arithmetic(6), Conversations("assistant"), Chat(policy.payload))]
    for epoch in (curve[:2], curve[2:]):
        assert sum(row["tokens"] for row in epoch) == sum(len(document) for document in documents)
        assert sum(row["trained_tokens"] for row in epoch) == sum(document.num_trained for document in documents)
    assert metrics["trained_tokens"] == 2 * sum(document.num_trained for document in documents)
    vocabulary = json.loads((policy.payload / "config.json").read_text())["vocab_size"]
    assert 0.98 * math.log(vocabulary) < curve[0]["entropy"] <= math.log(vocabulary)
    assert all({"loss", "grad_norm", "learning_rate", "tokens_per_second"} <= row.keys() for row in curve)


@pytest.mark.parametrize(
    ("numerics", "capacity"),
    [
        ({"micro_batch_tokens": 1024}, lambda lengths: 1024),
        ({"micro_batch_tokens": 8}, sum),  # each is longer than the budget and fills a pass of its own
        ({"packing": False, "micro_batch_sequences": 4}, lambda lengths: 4 * max(lengths)),
    ],
    ids=["one pass", "each alone", "padded"],
)
def test_packing_is_the_share_of_the_capacity_that_is_filled(tmp_path, policy, numerics, capacity):
    rows = models.arithmetic(4)
    _, job = train(tmp_path, policy, rows, Numerics(threads=1, **numerics))
    lengths = [len(document) for (document,) in models.units(rows, Conversations("assistant"), Chat(policy.payload))]
    assert len(set(lengths)) > 1
    assert models.curve(job)[0]["packing"] == pytest.approx(sum(lengths) / capacity(lengths))


@pytest.mark.parametrize("count", [4, 2])
def test_the_sum_is_divided_by_the_configured_batch(tmp_path, policy, count):
    """Open-instruct's sum with one sequence in a micro-batch: the mean over 4 micro-batches (accumulation x ranks) of the sum over
    tokens, also where an epoch's last batch has but 2. With n tokens it is n / 4 times the mean over tokens, and so is its gradient."""
    norms = {}
    for reduction in ("mean", "sum"):
        metrics, job = train(tmp_path / reduction, policy, models.arithmetic(count), loss_reduction=reduction)
        (row,) = models.curve(job)
        norms[reduction] = row["grad_norm"]  # before clipping
        assert row["samples"] == count and metrics["loss"] == row["loss"]
    assert norms["sum"] / norms["mean"] == pytest.approx(metrics["trained_tokens"] / 4, rel=1e-4)


def test_rows_are_trained_in_the_order_of_the_data_where_the_recipe_says_so(tmp_path, policy):
    """7 rows by 3 over 2 epochs, the longest first; `shuffled`, which is the default, has them in another order in each epoch."""
    count, by = 7, Chat(policy.payload)
    rows = sorted(two_turns(count), key=lambda row: -len(row["messages"][0]["content"]))
    lengths = [len(document) for (document,) in models.units(rows, Conversations("assistant"), by)]
    tokens = {}
    for order in ("given", "shuffled"):
        _, job = train(tmp_path / order, policy, rows, epochs=2, **{"order": order, "global_batch": 3})
        tokens[order] = [row["tokens"] for row in models.curve(job)]
    steps = [sum(lengths[start : start + 3]) for start in (0, 3, 6)]
    assert tokens["given"] == steps * 2 and len(set(steps)) == 3
    assert tokens["shuffled"][:3] != steps and tokens["shuffled"][:3] != tokens["shuffled"][3:]


def test_held_out_rows_are_measured_and_not_trained_on(tmp_path, policy):
    """Of 12 rows, training sees those that the hash keeps, and the held-out loss before any learning is the others' mean."""
    rows = models.arithmetic(12)
    held = [row for row in rows if is_held_out(row["id"], 0.4, 0)]
    assert 0 < len(held) < len(rows)
    kept = [row for row in rows if row not in held]
    optimizer = {"learning_rate": 1e-12}
    metrics, job = train(tmp_path / "held", policy, rows, holdout=0.4, epochs=2, measure_every=2, optimizer=optimizer)
    alone, _ = train(tmp_path / "alone", policy, held, global_batch=len(held), optimizer=optimizer)
    curve = models.curve(job)
    measured = [row["step"] for row in curve if "held_out_loss" in row]
    assert measured == [*range(2, len(curve) + 1, 2)] + [len(curve)] * (len(curve) % 2)
    assert metrics["rows"] == len(kept) and metrics["held_out_rows"] == len(held)
    assert metrics["held_out_loss"] == curve[-1]["held_out_loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert sum(row["samples"] for row in curve) == 2 * len(kept)


def test_measuring_changes_no_bit_of_the_model(tmp_path, policy):
    """The rows held out are the same, so the weights must be, however often they are measured."""
    weights = []
    for every in (1, None):
        _, job = train(tmp_path / str(every), policy, models.arithmetic(12), holdout=0.4, measure_every=every)
        weights.append((job.out / "payload/model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_max_steps_ends_training_and_the_schedule(tmp_path, policy):
    """6 rows by 4 over 2 epochs are 4 steps; 3 are made, and the linear schedule is that of 3 steps."""
    optimizer = {"learning_rate": 1e-3, "schedule": "linear"}
    metrics, job = train(tmp_path / "bounded", policy, models.arithmetic(6), epochs=2, max_steps=3, optimizer=optimizer)
    assert metrics["steps"] == 3 and [row["samples"] for row in models.curve(job)] == [4, 2, 4]
    assert [row["learning_rate"] for row in models.curve(job)] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    metrics, _ = train(tmp_path / "unbounded", policy, models.arithmetic(6), epochs=2, max_steps=99, optimizer=optimizer)
    assert metrics["steps"] == 4


def test_a_few_dropped_rows_of_a_few_that_are_held_out_are_noted(tmp_path):
    """`refuse_dropped` is about all rows; of those held out, any that is left is measured."""

    def reported(dropped):
        job = models.a_job(tmp_path)
        documents = [([5] * size, [True] * size) for size in (100 if place in dropped else 20 for place in range(len(rows)))]
        every = models.units_of_batch(models.batch_of(documents, schema(300)), 1)
        report_rows(rows, len(rows) - len(held), len(held) - len(dropped), every, config, job)
        return job.marks

    config = models.config_of("sft", **SFT, holdout=0.2)
    rows = models.arithmetic(40)
    held = [place for place, row in enumerate(rows) if is_held_out(held_together(row), 0.2, config.seed)]
    count = len(held)
    assert count > 2
    assert reported(held[1:])[-1] == f"{count - 1} of {count} held-out rows were dropped (longer than max_length 96)"
    with pytest.raises(StageError, match=rf"{count} of {count} held-out .* so that nothing would be measured: .* or set holdout: 0"):
        reported(held)
