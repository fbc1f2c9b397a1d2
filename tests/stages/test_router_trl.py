"""Loss and gradient of a mixture of experts are those of TRL's trainers with their default coefficient: the model's own."""

import copy

import models
import policy_lab
import pytest
import router_lab
import torch
from datasets import Dataset

from pedigree.configs.language.execution import Numerics
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.preference_train import run as preference_train
from pedigree.stages.sft import run as sft
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.policy_update import TrainingSample, initial_state, update_policy

pytestmark = pytest.mark.slow
COMMON = {"max_length": 128, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
STAGE = {"global_batch": 6, "max_steps": 1, "max_length": 96, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3, "max_grad_norm": None}}


@pytest.fixture(scope="module")
def mixture(policy, tmp_path_factory):
    return router_lab.mixture(tmp_path_factory.mktemp("mixtral"), "mixtral", policy)


@pytest.fixture(scope="module")
def tokenizer(mixture):
    """Without the line break that ChatML puts behind the end-of-turn token."""
    chat = Chat(mixture.payload)
    changed = copy.deepcopy(chat.tokenizer)
    changed.chat_template = chat.template.replace(r"{% endgeneration %}{{ '\n' }}", "{% endgeneration %}")
    return changed


def model_of(mixture):
    return load_policy(mixture, Numerics(attention="sdpa")).model


def norm(loss, model):
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).norm().item()


def equal(row, loss, model):
    """The loss with that of the routers, and the norm of the gradient."""
    assert row["aux_loss"] > 2.01
    assert row["loss"] + router_lab.COEFFICIENT * row["aux_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(norm(loss, model), rel=1e-4)


def stage(kind, module, folder, mixture, rows, **config):
    """The first line of the curve, in passes of at most two documents."""
    port, form = ("data", "conversation") if kind == "sft" else ("preferences", "preference")
    job = models.a_job(folder, Numerics(threads=1, micro_batch_tokens=96))
    given = {"policy": {"p": mixture}, port: {"d": models.dataset(folder / "data", form, rows)}}
    module.run(models.config_of(kind, **STAGE, **config), given, job)
    return models.curve(job)[0]


def test_sft(tmp_path, mixture, tokenizer):
    from trl import SFTConfig, SFTTrainer

    rows, model = models.arithmetic(6), model_of(mixture)
    data = Dataset.from_list([{"messages": row["messages"]} for row in rows])
    arguments = SFTConfig(output_dir=str(tmp_path / "trl"), assistant_only_loss=True, per_device_train_batch_size=6, **COMMON)
    theirs = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    batch = theirs.data_collator([theirs.train_dataset[i] for i in range(6)])
    equal(stage("sft", sft, tmp_path / "sft", mixture, rows), theirs.compute_loss(model.eval(), batch), model)


def test_dpo(tmp_path, mixture, tokenizer):
    from trl import DPOConfig, DPOTrainer

    rows, model = models.sums_or_not_known(6), model_of(mixture)
    answers = [[[{"role": "assistant", "content": answer["text"]}] for answer in row["answers"]] for row in rows]
    data = [
        {"prompt": row["messages"], "chosen": chosen, "rejected": rejected} for row, (chosen, rejected) in zip(rows, answers, strict=True)
    ]
    arguments = DPOConfig(output_dir=str(tmp_path / "trl"), per_device_train_batch_size=6, beta=0.1, **COMMON)
    reference = model_of(mixture)
    theirs = DPOTrainer(model, reference, arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer)
    batch = theirs.data_collator([theirs.train_dataset[i] for i in range(6)])
    row = stage("preference_train", preference_train, tmp_path / "dpo", mixture, rows, loss={"type": "dpo", "beta": 0.1})
    equal(row, theirs.compute_loss(model.eval(), batch), model)


def test_grpo_with_a_group_of_equal_rewards(tmp_path, mixture, tokenizer):
    """Rewards 1, 0 and 1, 1: the second group has no advantages, but its tokens have a router loss."""
    from trl import GRPOConfig, GRPOTrainer

    prompts, answers = [[5, 6, 7], [8, 9, 10, 11, 12]], [[20, 21, 22, 23, 24, 25], [30], [40, 41, 42], [50, 51, 52, 53]]
    model, size = model_of(mixture), 0.5 / (0.5**0.5 + 1e-4)
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=4, num_generations=2, max_completion_length=policy_lab.LONGEST,
        temperature=policy_lab.TEMPERATURE, beta=0.0, loss_type="grpo", use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none",
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "x"}] * 4)
    theirs = GRPOTrainer(model, lambda completions, **_: [0.0] * 4, arguments, train_dataset=data, processing_class=tokenizer)
    long, width = max(map(len, answers)), max(map(len, prompts))
    given = {
        "prompt_ids": torch.tensor([[0] * (width - len(prompts[i // 2])) + prompts[i // 2] for i in range(4)]),
        "prompt_mask": torch.tensor([[0] * (width - len(prompts[i // 2])) + [1] * len(prompts[i // 2]) for i in range(4)]),
        "completion_ids": torch.tensor([answer + [0] * (long - len(answer)) for answer in answers]),
        "completion_mask": torch.tensor([[1] * len(answer) + [0] * (long - len(answer)) for answer in answers]),
        "advantages": torch.tensor([size, -size, 0.0, 0.0]),
        "old_per_token_logps": None,
        "num_items_in_batch": torch.tensor(sum(map(len, answers))),
    }
    made = policy_lab.learner(policy_lab.algorithm("grpo", kl=None), mixture)
    samples = []
    for i, (answer, reward) in enumerate(zip(answers, [1.0, 0.0, 1.0, 1.0], strict=True)):
        with torch.no_grad():
            logps = made.trainer.module(collate([(document(prompts[i // 2], answer),)], made.numerics, 0), policy_lab.TEMPERATURE)[0]
        samples.append(TrainingSample(f"p{i // 2}", prompts[i // 2], answer, logps.tolist(), reward))
    done = update_policy(made, samples, 2, 0, initial_state(made.algorithm))
    policy_lab.close(made)
    assert done.metrics["kept_answers"] == 4 and done.metrics["informative_groups"] == 1
    equal(done.metrics, theirs._compute_loss(model.eval(), given), model)
