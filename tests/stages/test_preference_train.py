"""Preference training around its losses: one gradient for every cut of the batch, references of every kind, refusals."""

import json
import math
from dataclasses import replace

import models
import pytest
import torch

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import Input
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.stages.core.batches import collate, document
from pedigree.stages.job.failures import StageError
from pedigree.stages.preference_train import run as preference_train
from pedigree.stages.preference_train.run import (
    PreferenceExample,
    PreferenceObjective,
    add_gradient,
    comparisons,
    documents_of,
    reference_point,
)
from pedigree.stages.reference_logprobs import run as reference_logprobs
from pedigree.stages.sampling import answer_log
from pedigree.stages.training.feed import feed
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.reference import content_key, online
from pedigree.stages.training.training_rows import is_held_out


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return models.tiny_policy(tmp_path_factory.mktemp("other"), seed=1)


def answers(*given):
    return [{"text": text, "score": score} for text, score in given]


def rows(count):
    """Pairs, every third of them uncertain, whose answers are of unequal length."""
    made = []
    for i, row in enumerate(models.arithmetic(count)):
        given = answers((row["messages"][1]["content"], None), ("not known " * (1 + i % 4), None))
        made.append({**row, "messages": row["messages"][:1], "answers": given, "strength": 0.8 if i % 3 == 0 else None})
    return made


def certain(count):
    return [{**row, "strength": None} for row in rows(count)]


def config(loss, **changed):
    fields = {"global_batch": 8, "max_length": 96, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}, "loss": loss}
    return models.config_of("preference_train", **{**fields, **changed})


CUTS = {
    "whole": (1, {"micro_batch_tokens": 4096}),
    "small packs": (1, {"micro_batch_tokens": 48}),
    "two ranks, packs without shared prompts": (2, {"micro_batch_tokens": 64, "attention": "sdpa"}),
    "three ranks, padded": (3, {"packing": False, "micro_batch_sequences": 2}),
}
METHODS = {"dpo": {"type": "dpo"}, "kto": {"type": "kto", "beta": 0.5}}


@pytest.fixture(scope="module")
def gradient(tmp_path_factory, policy, other):
    """Loss, z₀ and flat gradient of one global batch of a method under one cut: what each rank adds, added up."""
    chat, known = Chat(policy.payload), {}
    torch.set_num_threads(1)  # tensors so small that threads only wait for each other

    def of(name, cut):
        if (name, cut) not in known:
            ranks, changed = CUTS[cut]
            numerics = Numerics(**changed)
            wanted = config(METHODS[name])
            labelled = comparisons(wanted, certain(6) if name == "kto" else rows(6))
            units = models.units(labelled, documents_of(wanted), chat)
            batch = [PreferenceExample(unit, row["label"]) for row, unit in zip(labelled, units, strict=True)]
            module = load_policy(policy, numerics)
            objective = PreferenceObjective(wanted.loss, module, online(load_policy(other, numerics)), 96, torch.device("cpu"))

            def passes(given, rank):
                with feed([given], rank, ranks, numerics, chat.pad_id, objective.device) as fed:
                    yield from fed.micro_batches()

            def backward(loss, micro_batch):
                (loss * micro_batch.weight).backward()

            z0 = 0.0
            if name == "kto":
                given = objective.mismatched(batch)
                assert len(given.units) == len(batch)
                everything = sum(objective.sum_of_ratios(passes(given, rank)) for rank in range(ranks))
                z0 = float(reference_point(everything, len(batch), lambda values: values))
                assert reference_point(-everything, len(batch), lambda values: values) == 0
            total = 0.0
            for rank in range(ranks):
                tally = add_gradient(objective, passes(objective.trained(batch), rank), len(batch), z0, backward)
                total += tally.sums()["loss"].item() / len(batch)
            flat = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])
            known[name, cut] = total, z0, flat
        return known[name, cut]

    return of


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "whole"])
def test_every_cut_of_the_batch_gives_one_gradient(gradient, name, cut):
    (loss, z0, found), (whole_loss, whole_z0, expected) = gradient(name, cut), gradient(name, "whole")
    assert loss == pytest.approx(whole_loss, rel=1e-5) and z0 == pytest.approx(whole_z0, rel=1e-4)
    assert expected.norm() > 1e-3 and (name != "kto" or z0 > 0.01)
    assert (found - expected).norm() < 1e-4 * expected.norm()


def given(policy, data, **reference):
    ports = {"policy": {"policy": policy}, "preferences": {"data": data}}
    return ports | {port: {"it": artifact} for port, artifact in reference.items()}


def run(folder, data, policy, loss, numerics=None, reference=None, **changed):
    """(metrics, curve) of the stage, run in this process."""
    job = models.a_job(folder, numerics or Numerics(threads=1))
    ports = given(policy, data, **({"reference": reference} if reference else {}))
    metrics = preference_train.run(config(loss, **changed), ports, job)
    return metrics, models.curve(job)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return models.dataset(tmp_path_factory.mktemp("pairs"), "preference", rows(12))


def logprobs(folder, policy, data, **changed):
    job = models.a_job(folder, Numerics(threads=1, micro_batch_tokens=128))
    fields = {"max_length": 96, "dtype": "fp32", **changed}
    reference_logprobs.run(models.config_of("reference_logprobs", **fields), given(policy, data), job)
    return models.publish(job.out, "reference_logprobs", "logprobs")


def test_cached_and_online_references_train_alike(tmp_path, policy, other, pairs):
    online, curve = run(tmp_path / "online", pairs, policy, {"type": "dpo"}, reference=other)
    _, cached_curve = run(tmp_path / "cached", pairs, policy, {"type": "dpo"}, reference=logprobs(tmp_path / "it", other, pairs))
    assert online["steps"] == 2 and abs(online["first_loss"] - math.log(2)) > 1e-3
    for name in ("loss", "grad_norm", "chosen_ratio", "rejected_ratio", "chosen_logp", "chosen_length", "margin", "accuracy"):
        assert [row[name] for row in cached_curve] == pytest.approx([row[name] for row in curve], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("loss", [{"type": "dpo"}, {"type": "simpo"}], ids=["referenced", "reference-free"])
def test_held_out_pairs_are_measured_as_training_would_measure_them(tmp_path, policy, other, loss):
    """Where nothing is learned, the held-out means are those of a run that trains on exactly these pairs."""
    every, reference = certain(16), None if loss["type"] == "simpo" else other
    held = [row for row in every if is_held_out(row["id"], 0.4, 0)]
    data = {name: models.dataset(tmp_path / name, "preference", rows) for name, rows in (("every", every), ("held", held))}
    nothing = {"optimizer": {"learning_rate": 1e-12}, "global_batch": 16}
    metrics, curve = run(tmp_path / "1", data["every"], policy, loss, reference=reference, holdout=0.4, **nothing)
    alone, _ = run(tmp_path / "2", data["held"], policy, loss, reference=reference, **nothing)
    assert ("chosen_ratio" in curve[0]) == (reference is not None) and "chosen_logp" in curve[0]
    assert 0 < len(held) == metrics["held_out_pairs"] == 16 - metrics["pairs"] and curve[-1]["held_out_loss"] == metrics["held_out_loss"]
    for name in ("loss", "accuracy", "margin", "chosen_logp", "rejected_entropy"):
        assert metrics[f"held_out_{name}"] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


def test_every_answer_is_cached_once_under_the_content_of_its_tokens(tmp_path, policy):
    """A list of three and a pair with one of its answers: three documents."""
    (row,) = models.arithmetic(1)
    shared = {"source": "test", "messages": row["messages"][:1], "strength": None}
    data = models.dataset(tmp_path / "data", "preference", [
        {"id": "list", **shared, "answers": answers(("a", 2.0), ("b c", 1.0), ("d", 0.0))},
        {"id": "pair", **shared, "answers": answers(("d", None), ("b c", None))},
    ])  # fmt: skip
    found = records.load(logprobs(tmp_path / "it", policy, data))
    chat = Chat(policy.payload)
    documents = [document(*chat.answer(row["messages"][:1], text)) for text in ("a", "b c", "d")]
    assert [row["id"] for row in found] == [content_key(doc) for doc in documents]
    module = load_policy(policy, Numerics())
    for row, doc in zip(found, documents, strict=True):
        with torch.no_grad():
            alone, _ = module(collate([(doc,)], Numerics(), chat.pad_id))
        assert row["length"] == len(alone) and row["logp"] == pytest.approx(alone.sum().item(), abs=1e-4)


def test_interrupted_reference_logprobs_go_on_and_end_in_the_same_bytes(tmp_path, policy, pairs, monkeypatch):
    monkeypatch.setattr(reference_logprobs, "CHUNK_ROWS", 5)
    whole = logprobs(tmp_path / "whole", policy, pairs)
    passed = []

    def dies_at_the_second(point):
        passed.append(point)
        if len(passed) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(answer_log, "fault_point", dies_at_the_second)
        logprobs(tmp_path / "again", policy, pairs)
    log = tmp_path / "again/chunks/answers.jsonl"
    before = log.read_text()
    assert before.count("\n") == 10 and passed == ["answers kept"] * 2
    again = logprobs(tmp_path / "again", policy, pairs)
    assert before < log.read_text() == (tmp_path / "whole/chunks/answers.jsonl").read_text()
    assert again.record.content == whole.record.content


def test_a_row_without_a_cached_log_probability_is_named_before_anything_is_loaded(tmp_path, policy, pairs):
    fewer = models.dataset(tmp_path / "fewer", "preference", rows(7))
    reference = logprobs(tmp_path / "it", policy, fewer)
    with pytest.raises(StageError, match=r"5 of 12 rows have no log-probability in `reference`, e.g. row-7: .*max_length"):
        run(tmp_path / "job", pairs, policy, {"type": "dpo"}, reference=reference)
    assert not (tmp_path / "job/curve.jsonl").exists()


def preferred(policy, rows):
    """Mean of log π(better answer) - log π(worse one), from the rows alone: whoever mixes sides up does so in his metrics too."""
    module, chat = load_policy(policy, Numerics()), Chat(policy.payload)
    documents = [(document(*chat.answer(row["messages"], answer["text"])),) for row in rows for answer in row["answers"]]
    batch = collate(documents, Numerics(), chat.pad_id)
    with torch.no_grad():
        logps_D = batch.sum_by_document(module(batch)[0])
    return (logps_D[0::2] - logps_D[1::2]).mean().item()


FIRST = {"dpo": math.log(2), "kto": 0.5}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_loss_is_that_of_equal_models_and_training_lowers_it(tmp_path, policy, name):
    data = models.dataset(tmp_path / "data", "preference", certain(12))
    settings = {"beta": 0.05} if name == "kto" else {}
    changed = {"epochs": 6, "optimizer": {"learning_rate": 3e-3}}
    metrics, curve = run(tmp_path / "job", data, policy, {"type": name, **settings}, **changed)
    assert metrics["first_loss"] == pytest.approx(FIRST[name], rel=1e-5)
    assert curve[-1]["loss"] < 0.99 * curve[0]["loss"] and curve[-1]["accuracy"] > 0.5
    assert curve[-1]["chosen_ratio"] > curve[-1]["rejected_ratio"]
    assert metrics["answers" if name == "kto" else "pairs"] == (24 if name == "kto" else 12)
    after = models.publish(tmp_path / "job/out", "preference_train", "policy")
    assert preferred(after, certain(12)) > preferred(policy, certain(12)) + 0.1
    logged = {"chosen_logp", "rejected_logp", "chosen_length", "rejected_length", "grad_norm", "accuracy"}
    assert logged | ({"kl", "desirable"} if name == "kto" else {"margin"}) <= set(curve[0])
    assert "loss_at_reference" not in curve[0]


def test_the_curve_tells_the_entropy_of_the_policy_on_both_sides(tmp_path, policy):
    """By the model's own logits, one answer at a time."""
    _, curve = run(tmp_path / "job", models.dataset(tmp_path / "data", "preference", certain(8)), policy, {"type": "dpo"})
    module, chat = load_policy(policy, Numerics(attention="sdpa")), Chat(policy.payload)
    for place, side in enumerate(("chosen", "rejected")):
        found = []
        for row in certain(8):
            prompt, answer = chat.answer(row["messages"], row["answers"][place]["text"])
            with torch.no_grad():
                logits = module.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            found.append(torch.distributions.Categorical(logits=logits.double()).entropy().mean().item())
        assert curve[0][f"{side}_entropy"] == pytest.approx(sum(found) / 8, rel=1e-4)


def test_a_model_compared_with_itself_otherwise_is_found_out():
    preference_train.check_first_loss(0.6932, math.log(2), config({"type": "dpo"}))
    with pytest.raises(StageError, match=r"the first loss is 0\.7100.* must be 0\.6931 within 0\.001"):
        preference_train.check_first_loss(0.71, math.log(2), config({"type": "dpo"}))
    preference_train.check_first_loss(500_100.0, 500_000.0, config({"type": "sppo_hard"}))  # relative where losses are large


def test_the_policys_own_cached_log_probabilities_are_its_reference(tmp_path, policy, other, pairs):
    for artifact, expected in ((policy, True), (other, False)):
        made = logprobs(tmp_path / str(expected), artifact, pairs)
        edge = Input(port="policy", label="policy", content=artifact.record.content, producer="0" * 64)
        linked = replace(made, record=made.record.model_copy(update={"inputs": (edge,)}))
        assert preference_train.is_reference(linked, policy) is expected


def preference_of(*given, strength=None):
    messages = [{"role": "user", "content": "?"}]
    return {"id": "p", "source": "test", "messages": messages, "answers": answers(*given), "strength": strength}


def test_kto_reads_pairs_lists_and_scored_singles():
    given = [
        preference_of(("good", None), ("bad", None)),
        preference_of(("best", 3.0), ("middle", 2.0), ("worst", 1.0)),
        preference_of(("right", 1.0)),
        preference_of(("wrong", 0.0)),
    ]
    found = comparisons(config({"type": "kto"}), given)
    assert [(row["text"], row["label"]) for row in found] == [
        ("good", 1), ("bad", 0), ("best", 1), ("worst", 0), ("right", 1), ("wrong", 0),
    ]  # fmt: skip
    (only,) = comparisons(config({"type": "kto", "threshold": -1.0}), given[3:])
    assert only["label"] == 1


@pytest.mark.parametrize(
    ("loss", "row", "message"),
    [
        ("kto", preference_of(("a", None)), "preference p is a single answer without a score"),
        ("kto", preference_of(("a", None), ("b", None), strength=0.7), "preference p has strength 0.7, but kto takes only certain pairs"),
        ("sppo_soft", preference_of(("a", 1.0), ("b", 0.0)), "preference p has neither a win_rate in both answers nor a strength"),
        ("sppo_hard", preference_of(("a", None), ("b", None), strength=0.7), "sppo_hard takes only certain pairs: use a loss that"),
    ],
)
def test_rows_that_a_loss_cannot_read_are_refused(loss, row, message):
    with pytest.raises(StageError, match=message):
        comparisons(config({"type": loss}), [row])


def test_sppo_reads_what_each_answer_wins_and_of_a_pair_with_a_strength_alone_what_it_says():
    known = preference_of(("a", 2.0), ("b", 1.0))
    known["answers"][0]["win_rate"], known["answers"][1]["win_rate"] = 0.9, 0.3
    found = comparisons(config({"type": "sppo_soft"}), [known, preference_of(("a", None), ("b", None), strength=0.7)])
    assert [row["win_rates"] for row in found] == [(0.9, 0.3), (0.7, pytest.approx(0.3))]


def test_sppo_trains_on_the_win_rates_of_its_rows_under_every_cut(tmp_path, policy):
    """Where the policy is its reference, log-ratios are 0: the first loss is the mean of ((P_w - ½) / β)² + ((P_l - ½) / β)²."""
    wins = [(0.9, 0.3) if i % 2 else (0.6, 0.5) for i in range(8)]
    given_rows = certain(8)
    for row, rates in zip(given_rows, wins, strict=True):
        for answer, rate in zip(row["answers"], rates, strict=True):
            answer["win_rate"] = rate
    data = models.dataset(tmp_path / "data", "preference", given_rows)
    cuts = {"whole": {}, "packs": {"micro_batch_tokens": 48}, "padded": {"packing": False, "micro_batch_sequences": 2}}
    sppo = {"type": "sppo_soft", "beta": 0.1}
    found = {cut: run(tmp_path / cut, data, policy, sppo, Numerics(threads=1, **changed), epochs=4) for cut, changed in cuts.items()}
    # (4² + 2²) and (1² + 0²), half of the rows each
    assert all(metrics["first_loss"] == pytest.approx((20 + 1) / 2, rel=1e-5) for metrics, _ in found.values())
    curves = {cut: [row["loss"] for row in curve] for cut, (_, curve) in found.items()}
    assert curves["packs"] == pytest.approx(curves["whole"], rel=1e-4) == curves["padded"] and curves["whole"][-1] < curves["whole"][0]


def test_lists_become_the_pairs_that_are_asked_for():
    row = preference_of(("a", 3.0), ("b", 2.0), ("c", 1.0))
    found = {lists: comparisons(config({"type": "dpo"}, lists=lists), [row]) for lists in ("best_vs_worst", "adjacent", "all")}
    assert {lists: [row["chosen"] + row["rejected"] for row in made] for lists, made in found.items()} == {
        "best_vs_worst": ["ac"], "adjacent": ["ab", "bc"], "all": ["ab", "ac", "bc"],
    }  # fmt: skip


def test_kto_refuses_pairs_in_which_one_answer_is_good_and_bad():
    with pytest.raises(ValueError, match="adjacent would label the same answer"):
        config({"type": "kto"}, lists="adjacent")


def test_kto_refuses_a_batch_of_one_answer_which_has_no_other_prompt():
    with pytest.raises(ValueError, match="global_batch is 1, but kto estimates its KL on answers to other prompts"):
        config({"type": "kto"}, global_batch=1)
    config({"type": "dpo"}, global_batch=1)


def test_kto_refuses_rows_of_which_no_step_has_two_prompts_before_a_model_is_loaded(tmp_path, policy):
    """The sides of each pair follow each other in the data, so that two answers in its order are always to one prompt."""
    data = models.dataset(tmp_path / "data", "preference", certain(4))
    with pytest.raises(StageError, match=r"each of 4 steps has answers to 1 prompt only.*global_batch \(2\).*order: given.*prompts \(4\)"):
        run(tmp_path / "job", data, policy, {"type": "kto"}, global_batch=2, order="given")
    assert not (tmp_path / "job/curve.jsonl").exists()


def test_kto_counts_the_steps_in_which_nothing_could_be_mismatched(tmp_path, policy):
    """Six answers in their order, in batches of four: the second has both sides of the third pair alone."""
    data = models.dataset(tmp_path / "data", "preference", certain(3))
    metrics, curve = run(tmp_path / "job", data, policy, {"type": "kto"}, global_batch=4, order="given", epochs=2)
    assert metrics["steps_without_kl"] == 2 and metrics["steps"] == 4
    assert curve[1]["kl"] == curve[3]["kl"] == 0


@pytest.mark.parametrize(("loss", "counted", "holdout"), [("dpo", "pairs", 0.4), ("kto", "answers", 0.0)])
def test_sides_that_are_equal_after_truncation_are_neither_trained_nor_held_out(tmp_path, policy, loss, counted, holdout):
    """Their margin is 0 for every model: of 20 pairs, 8 are alike within 32 tokens."""
    rows = certain(20)
    for row in rows[:8]:
        row["answers"] = answers(("yes " * 40 + "yes", None), ("yes " * 40 + "no", None))
    held = [is_held_out(row["id"], holdout, 0) for row in rows]
    assert not holdout or (0 < sum(held[:8]) and 0 < sum(held[8:]) < 12)
    fields = {"max_length": 32, "too_long": "truncate", "global_batch": 4, "refuse_dropped": 1.0}
    data, each = models.dataset(tmp_path / "data", "preference", rows), 1 if loss == "dpo" else 2
    metrics, _ = run(tmp_path / loss, data, policy, {"type": loss}, **fields, **({"holdout": holdout} if holdout else {}))
    assert metrics.get("held_out_pairs", 0) == sum(held[8:]) and metrics[counted] == each * (12 - sum(held[8:]))
    (dropped,) = json.loads((models.a_job(tmp_path / loss).evidence / "counts.json").read_text())["dropped"]
    assert dropped == {"source": "test", "reason": "equal answers after truncation", "rows": each * 8}


def test_the_key_of_a_cached_log_probability_tells_every_token_and_the_border():
    documents = [document([1, 2], [3]), document([1], [2, 3]), document([9, 2], [3]), document([1, 2], [4])]
    assert len({content_key(doc) for doc in documents}) == 4


def test_pairs_are_trained_in_the_order_of_the_data_where_the_recipe_says_so(tmp_path, policy):
    answers = [[{"text": "yes " * words, "score": 1.0}, {"text": "no", "score": 0.0}] for words in range(12, 0, -2)]
    given = [{**row, "answers": answers[number]} for number, row in enumerate(certain(6))]
    data = models.dataset(tmp_path / "data", "preference", given)
    _, curve = run(tmp_path / "job", data, policy, {"type": "dpo"}, order="given", epochs=2, global_batch=2)
    tokens = [row["tokens"] for row in curve]
    assert tokens[0] > tokens[1] > tokens[2] and tokens[:3] == tokens[3:]
