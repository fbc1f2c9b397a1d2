"""The stage in this process: what it trains on, what it holds out, and what it says of itself."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import a_job, config_of, curve, dataset, publish
from row_reading import read_rows
from sweeps import nightly_unless
from test_chat_and_vllm import sourced
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast, pipeline
from waiting import deadline

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import BradleyTerry
from pedigree.configs.rows.source_models import TEMPLATES
from pedigree.data.chat.chat import Chat
from pedigree.data.records import columns, records
from pedigree.data.records.records import Message
from pedigree.stages.core.batches import collate, document
from pedigree.stages.job.failures import StageError
from pedigree.stages.reward_model import run as reward_model
from pedigree.stages.reward_model.run import add_gradient, init_head, labelled_batch, settle
from pedigree.stages.sampling.rewards import FrozenRewardModel
from pedigree.stages.training.feed import feed
from pedigree.stages.training.models import load_reward_model
from pedigree.stages.training.training_rows import is_held_out

pytestmark = pytest.mark.slow
FIELDS = {"global_batch": 8, "max_length": 64, "dtype": "fp32", "epochs": 2, "holdout": 0.4, "optimizer": {"learning_rate": 3e-3}}


def preference(number, answers, strength=None):
    messages = [{"role": "user", "content": f"What is {number} + 1?"}]
    return {"id": f"row-{number}", "source": "test", "messages": messages, "answers": answers, "strength": strength}


def answer(text, score=None):
    return {"text": text, "score": score}


def ranked(number):
    """The more words, the worse."""
    return preference(number, [answer(f"{number}" + " no" * words, -0.5 * words) for words in range(3)])


def trained(tmp_path, policy, rows, numerics=None, **fields):
    job = a_job(tmp_path, numerics=numerics or Numerics(threads=1))
    data = dataset(tmp_path / "data", "preference", rows)
    config = config_of("reward_model", **{**FIELDS, **fields})
    metrics = reward_model.run(config, {"policy": {"p": policy}, "preferences": {"d": data}}, job)
    return metrics, job


def evidence(job, name):
    return json.loads((job.evidence / name).read_text())


def test_held_out_pairs_that_vanish_are_stated_apart(tmp_path, policy):
    held = [number for number in range(24) if is_held_out(f"row-{number}", 0.4, 0)]
    rows = [preference(number, [answer("yes"), answer("no " * (60 if number in held[:2] else 1))]) for number in range(24)]
    _, job = trained(tmp_path, policy, rows, epochs=1)
    assert job.marks[0].startswith("2 of 24 pairs were dropped")
    assert job.marks[1] == f"2 of {len(held)} held-out pairs were dropped (longer than max_length 64)"


def test_a_held_out_set_of_nothing_is_stated(tmp_path, policy):
    metrics, job = trained(tmp_path, policy, [ranked(number) for number in range(8)], epochs=1, holdout=1e-9)
    assert metrics["held_out_pairs"] == 0
    assert job.marks == ["holdout 1e-09 holds out none of 24 pairs, so that nothing is measured on them: add pairs, or raise it"]


def test_ranked_lists_with_margins_are_learnt_and_the_report_adds_up(tmp_path, policy):
    rows = [ranked(number) for number in range(16)] + [preference(99, [answer("1", 1.0)])]
    metrics, job = trained(tmp_path, policy, rows, loss={"type": "bradley_terry", "margin_weight": 0.5, "centering": 0.01})
    assert (metrics["pairs"] + metrics["held_out_pairs"], metrics["pairs"] % 3) == (48, 0)  # no list stands on both sides
    assert metrics["held_out_accuracy"] == 1.0 and metrics["held_out_ordered_triples"] == 1.0
    lists = metrics["held_out_pairs"] // 3  # all that is independent: the three pairs of a list share its answers
    assert metrics["held_out_accuracy_low"] == pytest.approx(lists / (lists + 3.8414588))
    assert metrics["held_out_accuracy_high"] == 1.0
    assert metrics["held_out_length_correlation"] < -0.5 and metrics["held_out_accuracy_chosen_shorter"] == 1.0
    assert "held_out_accuracy_chosen_longer" not in metrics  # there is no such pair
    calibration, report, lines = (
        evidence(job, "calibration.json"),
        evidence(job, "held_out.json"),
        read_rows(job.evidence / "held_out.jsonl"),
    )
    assert sum(one["pairs"] for one in calibration["bins"]) == calibration["pairs"] == metrics["held_out_pairs"] == len(lines)
    assert calibration["brier"] == metrics["held_out_brier"] < 0.25 and metrics["held_out_log_loss"] < 0.69
    assert {one["label_margin"] for one in lines} == {0.5, 1.0} and report["triples"] == metrics["held_out_pairs"] // 3
    assert sum(one["pairs"] for one in report["by_margin"]) == len(lines)
    every = [one[side] for one in lines for side in ("chosen", "rejected")]
    stats = json.loads((job.out / "payload" / "reward_stats.json").read_text())
    assert stats["mean"] == pytest.approx(sum(every) / len(every)) == metrics["held_out_reward_mean"]
    assert metrics["held_out_margin"] == pytest.approx(sum(one["chosen"] - one["rejected"] for one in lines) / len(lines))


def test_no_row_is_read_to_score_what_was_held_out(tmp_path, policy, monkeypatch):
    """Scoring goes by length, and what lies around a row on the disk is read with it: here each lies alone."""
    read = []
    whole = records.RowGroup.read
    monkeypatch.setattr(columns, "ROWS_PER_GROUP", 1)
    monkeypatch.setattr(records.RowGroup, "read", lambda group: read.append(group) or whole(group))
    metrics, _ = trained(tmp_path, policy, [ranked(number) for number in range(12)], epochs=1, holdout=0.7)
    assert metrics["held_out_pairs"] >= 6
    assert len(read) == 3 * 12  # what pairs there are, their tokens, their labels


def test_nothing_is_trained_before_isolation_is_proved(tmp_path, policy, monkeypatch):
    def leaks(*_):
        raise PedigreeError("they see each other")

    monkeypatch.setattr(reward_model, "probe", leaks)
    with pytest.raises(PedigreeError, match="they see each other"):
        trained(tmp_path, policy, [ranked(number) for number in range(4)], holdout=0.0)
    assert not (tmp_path / "curve.jsonl").exists()


def test_the_better_answer_gets_the_higher_score(tmp_path, policy):
    """From the artifact and the rows alone: whoever mixes sides up does so in his metrics too."""
    rows = [ranked(number) for number in range(12)]
    _, job = trained(tmp_path, policy, rows, holdout=0.0, epochs=4)
    chat, module = Chat(policy.payload), load_reward_model(job.out / "payload", Numerics())
    documents = [(document(*chat.answer(row["messages"], answer["text"], scored=True)),) for row in rows for answer in row["answers"]]
    with torch.no_grad():
        scores = module(collate(documents, Numerics(), chat.pad_id)).view(-1, 3)
    assert (scores[:, 0] > scores[:, 1]).all() and (scores[:, 1] > scores[:, 2]).all()


def test_the_shares_of_any_number_of_ranks_add_up_to_one_gradient(policy):
    """Five pairs among two and three ranks: some make a pass that must not count."""
    rows = [{"margin": 0.5 * number, "strength": 0.6 + 0.1 * number} for number in range(5)]
    pairs = [(document([5, 6], [7] * (1 + number) + [2]), document([5, 6], [8, 2])) for number in range(5)]
    chat, loss, found = Chat(policy.payload), BradleyTerry(type="bradley_terry", margin_weight=1.0, centering=0.01), {}
    for ranks, numerics in ((1, Numerics()), (2, Numerics(micro_batch_tokens=12)), (3, Numerics(packing=False, micro_batch_sequences=2))):
        module = load_reward_model(policy.payload, numerics, pad_token_id=chat.pad_id)
        init_head(module.model.score, seed=1)
        given, sums = labelled_batch(list(zip(rows, pairs, strict=True)), loss.margin_weight), []
        for rank in range(ranks):
            with feed([given], rank, ranks, numerics, chat.pad_id, torch.device("cpu")) as fed:
                sums.append(add_gradient(loss, module, fed.micro_batches(), len(pairs), torch.Tensor.backward).sums())
        flat = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])
        found[ranks] = flat, sum(one["loss"].item() for one in sums), sum(one["margin"].item() for one in sums)
    for ranks in (2, 3):
        assert torch.allclose(found[ranks][0], found[1][0], atol=1e-5 * float(found[1][0].abs().max()) + 1e-7)
        assert found[ranks][1:] == pytest.approx(found[1][1:], rel=1e-5)


def test_margins_and_strengths_reach_the_loss_and_no_cut_of_the_batch_changes_it(tmp_path, policy):
    rows = [preference(number, [answer(str(number), 2.0), answer("no idea", 0.5)], strength=0.6 + 0.01 * number) for number in range(24)]
    loss = {"type": "bradley_terry", "margin_weight": 2.0}
    fields = {"holdout": 0.0, "epochs": 1, "optimizer": {"learning_rate": 1e-3}, "loss": loss}
    _, whole = trained(tmp_path / "a", policy, rows, **fields)
    _, parts = trained(tmp_path / "b", policy, rows, Numerics(threads=1, micro_batch_tokens=64), **fields)
    _, plain = trained(tmp_path / "c", policy, rows, **{**fields, "loss": {"type": "bradley_terry"}})
    losses = {job.folder.name: [(row["loss"], row["grad_norm"]) for row in curve(job)] for job in (whole, parts, plain)}
    assert len(losses["a"]) == 3 and all(one == pytest.approx(other, rel=2e-4) for one, other in zip(losses["a"], losses["b"], strict=True))
    assert losses["a"][0][0] > losses["c"][0][0] + 0.5  # scores near 0, z near -3: p softplus(3) + (1 - p) softplus(-3) instead of log 2


def test_pairs_of_equal_length_are_neither_longer_nor_shorter(tmp_path):
    def pair(chosen, rejected, **labels):
        row = {"id": "p", "list": "p", "source": "s", "chosen": "a", "rejected": "b", "strength": None, "margin": None, **labels}
        return row, tuple(document([5], [7] * length) for length in (chosen, rejected))

    held = [pair(3, 2), pair(2, 3, strength=0.25), pair(2, 2, margin=1.5)]
    found = reward_model.held_out_report(held, [(1.0, 0.0), (0.0, 1.0), (0.5, 1.0)], a_job(tmp_path))
    assert (found["accuracy"], found["accuracy_chosen_longer"], found["accuracy_chosen_shorter"]) == (pytest.approx(1 / 3), 1.0, 0.0)
    # σ(1), σ(-1) and σ(-½) against the labels 1, ¼ and 1
    brier = [(0.7310586 - 1) ** 2, (0.2689414 - 0.25) ** 2, (0.3775407 - 1) ** 2]
    assert found["brier"] == pytest.approx(sum(brier) / 3) and "ordered_triples" not in found
    assert [row["label_margin"] for row in read_rows(tmp_path / "out" / "evidence" / "held_out.jsonl")] == [None, None, 1.5]


def test_labels_that_say_nothing_are_certain_and_have_no_margin():
    rows = [{"margin": 2.0, "strength": 0.75}, {"margin": None, "strength": None}]
    margins, strengths = reward_model.targets(rows, 0.5)
    assert margins.tolist() == [1.0, 0.0] and strengths.tolist() == [0.75, 1.0]


def test_a_margin_that_nothing_has_is_refused_before_training(tmp_path, policy):
    rows = [preference(number, [answer("a"), answer("b")]) for number in range(4)]
    with pytest.raises(StageError, match=r"margin_weight is 0.5, but none of 4 pairs"):
        trained(tmp_path, policy, rows, loss={"type": "bradley_terry", "margin_weight": 0.5})


def test_the_seed_of_a_member_decides_its_head_and_what_it_holds_out(tmp_path, policy):
    """And with the epoch the order of the data: `tests/stages/core/test_batches.py`."""
    rows = [preference(number, [answer(str(number)), answer("no idea")]) for number in range(12)]
    whole = {"holdout": 0.0, "global_batch": 12, "epochs": 1}  # one step with all pairs: their order is no matter
    first = [curve(trained(tmp_path / f"h{n}", policy, rows, seed=seed, **whole)[1])[0]["loss"] for n, seed in enumerate((1, 1, 2))]
    assert first[0] == first[1] != pytest.approx(first[2], abs=1e-4)
    heads = [nn.Linear(15, 1, bias=False) for _ in range(400)]
    for seed, head in enumerate(heads):
        reward_model.init_head(head, seed)
    weights = torch.cat([head.weight for head in heads])
    assert weights.std().item() == pytest.approx(1 / 4, rel=0.03)  # 1/√(15 + 1)
    held = []
    for seed in (1, 2):
        _, job = trained(tmp_path / f"s{seed}", policy, rows, seed=seed, holdout=0.5, epochs=1)
        held.append({row["id"] for row in read_rows(job.evidence / "held_out.jsonl")})
    assert held[0] != held[1] and all(held)


def test_lists_are_trained_in_the_order_of_the_data_where_the_recipe_says_so(tmp_path, policy):
    rows = [preference(number, [answer("y" * words, 1.0), answer("no", 0.0)]) for number, words in enumerate(range(12, 0, -2))]
    _, job = trained(tmp_path, policy, rows, order="given", holdout=0.0, global_batch=2)
    tokens = [row["tokens"] for row in curve(job)]
    assert tokens[0] > tokens[1] > tokens[2] and tokens[:3] == tokens[3:]


def repadded(payload, **named):
    """A policy's folder whose tokenizer pads with the end of turn, as models imported before may, and on the left, and begins all texts."""
    tokenizer = AutoTokenizer.from_pretrained(payload)
    first = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", pair="$A $B", special_tokens=[first])
    chosen = {"eos_token": tokenizer.eos_token, "pad_token": tokenizer.eos_token, **named}
    fixed = {"chat_template": tokenizer.chat_template, "padding_side": "left"}
    changed = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **fixed, **chosen)
    changed.save_pretrained(payload)
    config = json.loads((payload / "config.json").read_text())
    (payload / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.eos_token_id}))


ASKED: list[list[Message]] = [
    [{"role": "user", "content": "What is 1 + 1?"}],
    [{"role": "user", "content": "And of 20 and 22 the sum, please?"}],
    [{"role": "user", "content": "Yes or no?"}],
]
SAID = ["It is two.", "42", "\n\n  Yes.\n"]


def scores_of_transformers(folder):
    """Of each conversation alone, of all in a padded batch, as its documentation says, and of their texts."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    whole = [[*asked, {"role": "assistant", "content": said}] for asked, said in zip(ASKED, SAID, strict=True)]
    with torch.no_grad():
        alone = [model(**tokenizer.apply_chat_template(one, return_dict=True, return_tensors="pt")).logits.item() for one in whole]
        batch = tokenizer.apply_chat_template(whole, padding=True, return_dict=True, return_tensors="pt")
        texts = tokenizer.apply_chat_template(whole, tokenize=False)
        piped = pipeline("text-classification", model=model, tokenizer=tokenizer, batch_size=2)(texts)
        return alone, model(**batch).logits[:, 0].tolist(), [one["score"] for one in piped]


def our_scores(folder, job) -> Any:
    answers = [{"messages": asked, "text": said, "finish_reason": "stop"} for asked, said in zip(ASKED, SAID, strict=True)]
    return FrozenRewardModel(folder, "fp32", job).rewards(answers, lambda _: None)[0]


TEMPLATE_NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


@pytest.fixture(scope="module")
def trained_with(tmp_path_factory):
    """A reward model's folder and its scores here, by template and padding."""
    made: dict[tuple[str, str], tuple[Any, Any]] = {}

    def of(template, padding):
        if (template, padding) not in made:
            folder = tmp_path_factory.mktemp(template)
            payload = sourced(folder / "policy" / "payload", template, "Llama 3")
            if padding == "end of turn":
                repadded(payload, unk_token="<|endoftext|>")
            rows = [preference(number, [answer(str(number)), answer("no idea")]) for number in range(3)]
            policy = publish(folder / "policy", "source_model", "policy")
            _, job = trained(folder, policy, rows, epochs=1, holdout=0.0, max_length=2048)
            made[template, padding] = job.out / "payload", our_scores(job.out / "payload", job)
        return made[template, padding]

    return of


DAILY = [("chatml", "end of turn"), ("llama3", "end of turn"), ("gemma", "its own"), ("tulu", "end of turn")]


@pytest.mark.parametrize(("template", "padding"), nightly_unless(DAILY, product(TEMPLATE_NAMES, ["its own", "end of turn"])))
def test_a_conversation_has_one_score_here_and_in_transformers(template, padding, trained_with):
    """Most templates write a newline after the end of a turn, which transformers reads; others end with the token that may be padding. An
    answer that begins with white space may share a token with the template, and tokenizers may put BOS before a text that has one."""
    folder, ours = trained_with(template, padding)
    assert all(ours == pytest.approx(scores, abs=1e-5) for scores in scores_of_transformers(folder))
    assert abs(ours[0] - ours[1]) > 1e-4


def test_successive_answers_to_one_prompt_share_its_computation(trained_with, tmp_path):
    (folder, _), texts = trained_with("chatml", "end of turn"), ["It is two.", "42", "Yes"]
    by_prompt = [{"messages": asked, "text": said, "finish_reason": "stop"} for asked in ASKED for said in texts]
    apart = [by_prompt[3 * prompt + answer] for answer in range(3) for prompt in range(3)]
    model, computed = FrozenRewardModel(folder, "fp32", a_job(tmp_path)), list[int]()
    model._module.register_forward_pre_hook(lambda _, given: computed.append(given[0].input_ids_BT.numel()))
    expected, _ = model.rewards(apart, lambda _: None)
    (each,) = computed
    found, _ = model.rewards(by_prompt, lambda _: None)
    assert [found[3 * prompt + answer] for answer in range(3) for prompt in range(3)] == pytest.approx(expected, abs=1e-5)
    prompts = [len(Chat(folder).answer(asked, texts[0])[0]) for asked in ASKED]
    assert computed[1] == each - 2 * sum(prompts)


@pytest.mark.parametrize("templates", [["chatml"], pytest.param(TEMPLATE_NAMES, marks=pytest.mark.nightly)], ids=["one", "all"])
def test_a_conversation_has_the_same_score_in_vllm(templates, trained_with, tmp_path):
    """Daily one that writes a newline after the end of a turn, with a tokenizer that puts BOS before texts."""
    made = [trained_with(template, "end of turn") for template in templates]
    whole = [[*asked, {"role": "assistant", "content": said}] for asked, said in zip(ASKED, SAID, strict=True)]
    (tmp_path / "conversations.json").write_text(json.dumps(whole))
    child = Path(__file__).parents[1] / "pipelines" / "vllm_child.py"
    command = [sys.executable, str(child), str(tmp_path / "conversations.json"), *(str(folder) for folder, _ in made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(900))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("found ")).removeprefix("found "))
    assert [scores for _, scores in found] == [pytest.approx(ours, abs=1e-4) for _, ours in made]


def test_a_score_does_not_depend_on_the_day(tmp_path):
    """Nor elsewhere: the template of a reward model reads no clock."""
    payload = sourced(tmp_path / "policy" / "payload", "chatml", "Llama 3")
    file = payload / "chat_template.jinja"
    file.write_text("{{ '<|im_start|>system\nToday is ' + strftime_now(\"%d %b '%y\") + '.<|im_end|>\n' }}" + file.read_text())
    settle(chat := Chat(payload))
    whole = [*ASKED[0], {"role": "assistant", "content": SAID[0]}]
    prompt, answer = chat.answer(ASKED[0], SAID[0], scored=True)
    assert chat.tokenizer.apply_chat_template(whole)["input_ids"] == prompt + answer
    assert "Today is 26 Jul '24." in chat.decode(prompt)


def test_padding_that_ends_conversations_is_refused_before_training(tmp_path):
    """A tokenizer with no special token but the end of turn, imported when one could stay so."""
    payload = sourced(tmp_path / "policy" / "payload", "tulu", "Llama 3")
    repadded(payload)
    rows = [preference(number, [answer("a"), answer("b")]) for number in range(3)]
    with pytest.raises(StageError, match=r"conversations end with '<\|im_end\|>', .* only token for padding.*import the model again"):
        trained(tmp_path, publish(tmp_path / "policy", "source_model", "policy"), rows)
    assert not (tmp_path / "curve.jsonl").exists()


def test_a_model_that_was_trained_before_is_read_where_it_was_trained(tmp_path, policy):
    """At the end of turn; its folder does not name another place."""
    _, job = trained(tmp_path, policy, [ranked(number) for number in range(4)], epochs=1, holdout=0.0)
    folder = job.out / "payload"
    stats = json.loads((folder / "reward_stats.json").read_text())
    (folder / "reward_stats.json").write_text(json.dumps({name: stats[name] for name in ("mean", "std")}))
    chat, module = Chat(folder), load_reward_model(folder, Numerics())
    documents = [(document(*chat.answer(asked, said)),) for asked, said in zip(ASKED, SAID, strict=True)]
    assert documents[0][0].ids[-1] == chat.eos_id
    with torch.no_grad():
        expected = module(collate(documents, Numerics(), chat.pad_id)).tolist()
    assert our_scores(folder, job) == pytest.approx(expected, abs=1e-5)
    (folder / "reward_stats.json").write_text(json.dumps(stats))
    assert our_scores(folder, job) != pytest.approx(expected, abs=1e-3)
