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
from commands import InProcessCommand
from in_process import InProcessLauncher
from projects import environment, fresh_project
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig, pipeline
from waiting import deadline

from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.data.artifacts.provenance import CODE_ROOT
from pedigree.data.chat.chat import Chat
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.rewards import FrozenRewardModel

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
  reward:
    kind: reward_model
    in: {policy: sft, preferences: [pairs]}
    global_batch: 8
    max_length: 64
    dtype: fp32
    optimizer: {learning_rate: 1e-3}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "What is 12 + 34?"}, {"role": "assistant", "content": "46"}],
    [{"role": "user", "content": "What is 1 + 1, in words and with a reason?"}, {"role": "assistant", "content": "It is two."}],
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """The folders `sft` and `reward`."""
    folder = tmp_path_factory.mktemp("round_trip")
    root = fresh_project(folder / "project")
    (root / "configs" / "recipes" / "mine.yaml").write_text(RECIPE)
    lab: Any = SimpleNamespace(root=root, code=CODE_ROOT, launcher=InProcessLauncher(Project(root)), environment=environment())
    typed = InProcessCommand(lab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)  # the jobs are threads, which cannot be asked to stop
        typed("run", "mine")
    for name in ("sft", "reward"):
        typed("export", f"mine/{name}", str(folder / name))
    return folder


@pytest.fixture(scope="module")
def policy(exported) -> SimpleNamespace:
    """As `HFLM` of lm-evaluation-harness loads it, from the folder alone."""
    folder = exported / "sft"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    questions = [tokenizer.apply_chat_template(one[:-1], tokenize=False, add_generation_prompt=True) for one in CONVERSATIONS]
    return SimpleNamespace(folder=folder, tokenizer=tokenizer, model=model, questions=questions, chat=Chat(folder))


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
    assert config.dtype == torch.float32 == policy.model.dtype
    asked = [policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in policy.questions]
    assert asked == [chat.prompt(one[:-1]) for one in CONVERSATIONS]


def test_the_harness_generates_and_weighs_the_same_in_a_batch_and_alone(policy):
    """lm-evaluation-harness (0.4.13, `models/huggingface.py`) pads prompts on the left to generate, and rows on the right to weigh."""
    alone = [greedy(policy, [text])[0] for text in policy.questions]
    assert greedy(policy, policy.questions) == alone
    assert all(answer[-1] == policy.chat.eos_id for answer in alone)  # it was trained to end its turns
    weighed = []
    for text, conversation in zip(policy.questions, CONVERSATIONS, strict=True):
        context, said = (policy.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, conversation[-1]["content"]))
        assert (context, [*said, policy.chat.eos_id]) == policy.chat.answer(conversation[:-1], conversation[-1]["content"])
        weighed.append((context, said))
    longest = max(len(context) + len(said) for context, said in weighed)
    rows = torch.tensor([[*context, *said, *[0] * (longest - len(context) - len(said))] for context, said in weighed])
    with torch.no_grad():
        together = policy.model(rows).logits.log_softmax(-1)
        for (context, said), logps in zip(weighed, together, strict=True):
            single = policy.model(torch.tensor([[*context, *said]])).logits[0].log_softmax(-1)
            span = slice(len(context) - 1, len(context) + len(said) - 1)
            torch.testing.assert_close(logps[span], single[span])


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


def test_one_conversation_has_one_score(exported, policy, tmp_path):
    """Here, in transformers alone and in a batch, in its pipeline, and in vLLM; and vLLM gives the answers of transformers."""
    folder = exported / "reward"
    job = Job(folder=tmp_path, address="r/s", key="k", numerics=Numerics(), placement=Placement(), source_files={})
    answers = [{"messages": one[:-1], "text": one[-1]["content"], "finish_reason": "stop"} for one in CONVERSATIONS]
    ours = FrozenRewardModel(folder, "fp32", job).rewards(answers, lambda _: None)[0]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto"), AutoTokenizer.from_pretrained(folder)
    assert (model.config.num_labels, model.config.problem_type, model.config.id2label) == (1, "regression", {0: "reward"})
    with torch.no_grad():
        batch = tokenizer.apply_chat_template(CONVERSATIONS, padding=True, return_dict=True, return_tensors="pt")
        assert model(**batch).logits[:, 0].tolist() == pytest.approx(ours, abs=1e-4)
    rendered = [tokenizer.apply_chat_template(one, tokenize=False) for one in CONVERSATIONS]
    piped = pipeline("text-classification", model=model, tokenizer=tokenizer)(rendered)
    assert [one["label"] for one in piped] == ["reward", "reward"]
    assert [one["score"] for one in piped] == pytest.approx(ours, abs=1e-4)
    (tmp_path / "conversations.json").write_text(json.dumps(CONVERSATIONS))
    command = [sys.executable, str(Path(__file__).with_name("vllm_child.py")), str(tmp_path / "conversations.json")]
    done = subprocess.run([*command, str(policy.folder), str(folder)], capture_output=True, text=True, timeout=deadline(300))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("found ")).removeprefix("found "))
    assert found["scores"] == [pytest.approx(ours, abs=1e-4)]
    assert abs(ours[0] - ours[1]) > 1e-2
    assert found["answers"] == [[ids, "stop"] for ids in (greedy(policy, [text])[0] for text in policy.questions)]
