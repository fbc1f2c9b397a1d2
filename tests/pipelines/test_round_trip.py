"""An exported folder is the whole truth for other libraries: transformers, TRL, vLLM and lm-evaluation-harness read what was trained."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import in_project
from projects import fresh_project
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig, pipeline
from waiting import deadline

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.rewards import FrozenRewardModel
from pedigree.stages.training.models import frozen, load_policy

pytestmark = pytest.mark.slow
RECIPE = """
description: A policy and a reward model that vLLM's kernels for CPUs can compute.
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: sums, sources: [{type: arithmetic, operations: [add], digits: [1], count: 5, seed: 900}]}
  sums: {kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [2], count: 80, seed: 1}]}
  chat: {kind: decontaminate, in: {data: sums, benchmarks: [suite]}}
  compared: {kind: prepare_data, record: preference, sources: [{type: arithmetic, operations: [add], digits: [2], count: 16, seed: 5}]}
  pairs: {kind: decontaminate, in: {data: compared, benchmarks: [suite]}}
  base:
    kind: source_model
    in: {corpus: [chat]}
    source: {type: random_llama, layers: 1, hidden: 128, heads: 4, kv_heads: 2, ffn: 128, vocabulary: 320, context: 128}
  sft: {kind: sft, in: {policy: base, data: [chat]}, global_batch: 8, max_length: 64, dtype: fp32, optimizer: {learning_rate: 3e-3}}
  half: {kind: sft, in: {policy: base, data: [chat]}, global_batch: 8, max_length: 64, optimizer: {learning_rate: 3e-3}}
""" + "".join(
    f"  {name}: {{kind: reward_model, in: {{policy: {policy}, preferences: [pairs]}}, global_batch: 8, max_length: 64, dtype: {dtype}, "
    "optimizer: {learning_rate: 1e-2}}\n"
    for name, policy, dtype in (("reward", "sft", "fp32"), ("reward_half", "half", "bf16"))
)
POLICIES = {"sft": torch.float32, "half": torch.bfloat16}
REWARD_MODELS = {"reward": torch.float32, "reward_half": torch.bfloat16}
CONVERSATIONS = [
    [{"role": "user", "content": "What is 12 + 34?"}, {"role": "assistant", "content": "46"}],
    [{"role": "user", "content": "What is 1 + 1, in words and with a reason?"}, {"role": "assistant", "content": "It is two."}],
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """The folders of the policies and reward models."""
    folder = tmp_path_factory.mktemp("round_trip")
    root = fresh_project(folder / "project")
    (root / "configs" / "recipes" / "mine.yaml").write_text(RECIPE)
    typed = in_project(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)  # the jobs are threads, which cannot be asked to stop
        typed("run", "mine")
    for name in (*POLICIES, *REWARD_MODELS):
        typed("export", f"mine/{name}", str(folder / name))
    return folder


@pytest.fixture(scope="module", params=POLICIES)
def policy(exported, request) -> SimpleNamespace:
    """As transformers load it, from the folder alone."""
    folder = exported / request.param
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    questions = [tokenizer.apply_chat_template(one[:-1], tokenize=False, add_generation_prompt=True) for one in CONVERSATIONS]
    return SimpleNamespace(
        folder=folder, tokenizer=tokenizer, model=model, questions=questions, chat=Chat(folder), dtype=POLICIES[request.param]
    )


def greedy(policy, texts):
    """Answers to rendered prompts, padded on the left, with the folder's generation config."""
    policy.tokenizer.padding_side = "left"
    batch = policy.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    made = policy.model.generate(**batch, do_sample=False, max_new_tokens=16)[:, batch["input_ids"].shape[1] :]
    pad = policy.tokenizer.pad_token_id
    return [[token for token in row if token != pad] for row in made.tolist()]


def test_config_tokenizer_and_generation_agree(policy):
    chat, config, generation = policy.chat, policy.model.config, GenerationConfig.from_pretrained(policy.folder)
    assert {config.eos_token_id, generation.eos_token_id, policy.tokenizer.eos_token_id} == {chat.eos_id}
    assert {config.pad_token_id, generation.pad_token_id, policy.tokenizer.pad_token_id} == {chat.pad_id}
    assert chat.eos_id != chat.pad_id
    assert config.dtype == policy.dtype == policy.model.dtype
    asked = [policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in policy.questions]
    assert asked == [chat.prompt(one[:-1]) for one in CONVERSATIONS]


@pytest.fixture(scope="module")
def harnesses(policy) -> list[Any]:
    """lm-evaluation-harness with `--model hf --model_args pretrained=FOLDER`, one request at a time and all in a batch."""
    from lm_eval.models.huggingface import HFLM

    return [HFLM(pretrained=str(policy.folder), device="cpu", batch_size=size) for size in (1, 8)]


def requested(harness, kind, *arguments):
    from lm_eval.api.instance import Instance

    requests: Any = [Instance(request_type=kind, doc={}, arguments=one, idx=place) for place, one in enumerate(arguments)]
    return getattr(harness, kind)(requests, disable_tqdm=True)


def test_the_harness_weighs_answers_as_pedigree_does(policy, harnesses):
    """With the template and without. What follows a context begins, for the harness, with the white space that ends the context."""
    pairs = [
        *((text, one[-1]["content"]) for text, one in zip(policy.questions, CONVERSATIONS, strict=True)),
        (policy.questions[0], "46<|im_end|>"),
        ("What is 12 + 34?", " 46"),
        ("", "It is two."),
    ]
    texts = [one[0]["content"] for one in CONVERSATIONS]
    assert [harness.apply_chat_template(one[:-1]) for harness in harnesses for one in CONVERSATIONS] == policy.questions * 2
    module = frozen(load_policy(SimpleNamespace(payload=policy.folder), Numerics()), torch.device("cpu"), policy.dtype)

    @torch.no_grad()
    def logp(context, said):
        asked, answer = (policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, said))
        return module(collate([(document(asked or [policy.chat.eos_id], answer),)], Numerics(), policy.chat.pad_id))[0].sum().item()

    ours = [logp(context.rstrip(), context[len(context.rstrip()) :] + said) for context, said in pairs]
    rolled = [logp("", text) for text in texts]
    # In bf16 the harness rounds log-probabilities and their sum, each by up to 2^-8 of it, and weights the logits that it has rounded
    close = {"abs": 1e-3} if policy.dtype == torch.float32 else {"rel": 2**-7}
    for harness in harnesses:
        assert harness.model.dtype == policy.dtype
        assert [one for one, _ in requested(harness, "loglikelihood", *pairs)] == pytest.approx(ours, **close)
        assert requested(harness, "loglikelihood_rolling", *((text,) for text in texts)) == pytest.approx(rolled, **close)


@pytest.mark.parametrize("policy", ["sft"], indirect=True)
def test_the_harness_reads_the_greedy_answers(policy, harnesses):
    texts = [*policy.questions, *(one[0]["content"] for one in CONVERSATIONS)]
    alone = [greedy(policy, [text])[0] for text in texts]
    assert all(answer[-1] == policy.chat.eos_id for answer in alone[:2])  # it was trained to end its turns
    said = policy.tokenizer.batch_decode(alone, skip_special_tokens=True)
    assert any(said)
    for harness in harnesses:
        assert requested(harness, "generate_until", *((text, {"until": [], "max_gen_toks": 16}) for text in texts)) == said


TASK = """
task: sums_of_mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: 16}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.parametrize("policy", ["sft"], indirect=True)
def test_a_task_of_the_harness_counts_the_answers_of_the_folder(policy, tmp_path):
    """Targets are the greedy answer where the template is applied, and another text for the second question."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    (tmp_path / "sums.yaml").write_text(TASK.format(folder=tmp_path))
    right = policy.tokenizer.decode(greedy(policy, policy.questions[:1])[0], skip_special_tokens=True)
    rows = [{"question": one[0]["content"], "answer": answer} for one, answer in zip(CONVERSATIONS, (right, "never"), strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = {
        templated: simple_evaluate(
            model="hf", model_args={"pretrained": str(policy.folder)}, device="cpu", batch_size=2, tasks=["sums_of_mine"],
            task_manager=tasks, apply_chat_template=templated, bootstrap_iters=0,
        )
        for templated in (True, False)
    }  # fmt: skip
    assert found[True]["results"]["sums_of_mine"]["exact_match,none"] == 0.5
    assert [one["arguments"][0][0] for one in found[True]["samples"]["sums_of_mine"]] == policy.questions
    assert [one["arguments"][0][0] for one in found[False]["samples"]["sums_of_mine"]] == [row["question"] for row in rows]


@pytest.mark.parametrize("policy", ["sft"], indirect=True)
def test_trl_loads_and_trains_it(policy, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=1, use_cpu=True, bf16=False, report_to="none",
        assistant_only_loss=True, save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_list([{"messages": one} for one in CONVERSATIONS])
    trainer = SFTTrainer(model=str(policy.folder), args=arguments, train_dataset=rows)
    ours = [policy.chat.training(one) for one in CONVERSATIONS]
    theirs = next(iter(trainer.get_train_dataloader()))
    found = {tuple(ids[ids != policy.chat.pad_id].tolist()) for ids in theirs["input_ids"]}
    assert found == {tuple(ids) for ids, _ in ours}
    assert (theirs["labels"] != -100).sum() == sum(sum(mask) for _, mask in ours)
    assert trainer.train().training_loss > 0
    assert (trainer.processing_class.pad_token_id, trainer.model.config.eos_token_id) == (policy.chat.pad_id, policy.chat.eos_id)


@pytest.fixture(scope="module")
def served(exported) -> dict[str, Any]:
    """What vLLM makes of a policy in fp32 and a reward model in bf16; `tests/stages/test_reward_model.py` has one in fp32."""
    (exported / "conversations.json").write_text(json.dumps(CONVERSATIONS))
    child, names = Path(__file__).with_name("vllm_child.py"), ["sft", "reward_half"]
    command = [sys.executable, str(child), str(exported / "conversations.json"), *(str(exported / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(300))
    assert done.returncode == 0, done.stderr[-3000:]
    found = next(line for line in done.stdout.splitlines() if line.startswith("found ")).removeprefix("found ")
    return dict(zip(names, json.loads(found), strict=True))


@pytest.mark.parametrize("policy", ["sft"], indirect=True)
def test_vllm_gives_the_answers_of_transformers(policy, served):
    assert served["sft"] == ["float32", [[greedy(policy, [text])[0], "stop"] for text in policy.questions]]


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_one_conversation_has_one_score(exported, served, name, tmp_path):
    """Here, in transformers alone and in a batch, in its pipeline, and in vLLM, which takes the dtype of the folder."""
    folder, dtype = exported / name, REWARD_MODELS[name]
    job = Job(folder=tmp_path, address="r/s", key="k", numerics=Numerics(), placement=Placement(), source_files={})
    answers = [{"messages": one[:-1], "text": one[-1]["content"], "finish_reason": "stop"} for one in CONVERSATIONS]
    ours = FrozenRewardModel(folder, "fp32" if dtype == torch.float32 else "bf16", job).rewards(answers, lambda _: None)[0]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto"), AutoTokenizer.from_pretrained(folder)
    assert (model.config.num_labels, model.config.problem_type, model.config.id2label) == (1, "regression", {0: "reward"})
    assert model.config.dtype == dtype == model.dtype
    with torch.no_grad():
        batch = tokenizer.apply_chat_template(CONVERSATIONS, padding=True, return_dict=True, return_tensors="pt")
        found = model(**batch, output_hidden_states=True)
    # A score is Σ w_i h_i. In bf16 each h_i is off by up to 2^-8 of it, independently; outside, the score itself is rounded by up to 2^-8.
    last = found.hidden_states[-1][range(len(batch["input_ids"])), batch["attention_mask"].sum(dim=1) - 1].float()
    spread = (last * model.score.weight.float()).norm(dim=1).max().item() * 2**-8
    close = 1e-4 if dtype == torch.float32 else 3 * spread + 2**-8 * max(ours)
    assert abs(ours[0] - ours[1]) > 2 * close
    assert found.logits[:, 0].tolist() == pytest.approx(ours, abs=close)
    rendered = [tokenizer.apply_chat_template(one, tokenize=False) for one in CONVERSATIONS]
    piped = pipeline("text-classification", model=model, tokenizer=tokenizer)(rendered)
    assert [one["label"] for one in piped] == ["reward", "reward"]
    assert [one["score"] for one in piped] == pytest.approx(ours, abs=close)
    if name in served:
        assert served[name] == [str(dtype).removeprefix("torch."), pytest.approx(ours, abs=close)]
