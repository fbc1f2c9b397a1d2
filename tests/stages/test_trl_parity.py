"""An independent implementation gets the same losses from the same messages: template, masks, log-probs and formula."""

import copy

import models
import pytest
import torch
from datasets import Dataset

from configs.execution import Numerics
from data.chat import Chat
from stages.core import losses
from stages.core.batches import collate
from stages.core.logprobs import PolicyModule, RewardModule
from stages.engines.rows import preference
from stages.preference_train import log_ratios
from stages.reward_model import init_head, targets

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return models.tiny_policy(tmp_path_factory.mktemp("policy"))


def said(text):
    return [{"role": "assistant", "content": text}]


def without_the_last_line_break(chat):
    """Our documents end with the end-of-turn token; the line break that ChatML puts behind it is no part of the answer."""
    template = chat.template.replace(r"{% endgeneration %}{{ '\n' }}", "{% endgeneration %}")
    assert template != chat.template
    return template


@pytest.mark.parametrize(("trl_name", "beta", "normalise"), [("sigmoid", 0.1, False), ("sigmoid_norm", 5.0, True)])
def test_dpo_loss_is_trls(tmp_path, policy, trl_name, beta, normalise):
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    reference = AutoModelForCausalLM.from_pretrained(policy.payload, dtype=torch.float32).eval()
    model = copy.deepcopy(reference)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    rows = [
        {**row, "messages": row["messages"][:1], "chosen": row["messages"][1]["content"], "rejected": f"{row['id']} is not known"}
        for row in models.arithmetic(6)
    ]
    chat = Chat(policy.payload)
    batch = collate([preference(chat)(row) for row in rows], Numerics(attention="sdpa"), chat.pad_id)
    with torch.no_grad():
        difference = PolicyModule(model, 1024)(batch)[0] - PolicyModule(reference, 1024)(batch)[0]
    ours, _ = losses.dpo(*log_ratios(batch, difference, normalise), beta)

    chat.tokenizer.chat_template = without_the_last_line_break(chat)
    theirs = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(
            output_dir=str(tmp_path),
            loss_type=[trl_name],
            beta=beta,
            per_device_train_batch_size=len(rows),
            max_length=128,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": row["messages"], "chosen": said(row["chosen"]), "rejected": said(row["rejected"])} for row in rows]
        ),
        processing_class=chat.tokenizer,
    )
    inputs = next(iter(theirs.get_train_dataloader()))
    with torch.no_grad():
        expected = theirs.compute_loss(model, inputs)
    assert ours.item() / len(rows) == pytest.approx(expected.item(), abs=1e-5)
    assert abs(expected.item() - 0.6931) > 1e-3  # policy and reference do differ


@pytest.mark.parametrize(("margin_weight", "centering"), [(0.0, 0.0), (0.5, 0.0), (1.0, 0.01)])
def test_reward_loss_is_trls_with_margin_and_centering(tmp_path, policy, margin_weight, centering):
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    chat = Chat(policy.payload)
    model = AutoModelForSequenceClassification.from_pretrained(
        policy.payload, num_labels=1, dtype=torch.float32, pad_token_id=chat.pad_id
    ).eval()
    init_head(model.score, seed=1)
    with torch.no_grad():
        model.score.weight *= 20  # far from zero: margin and centering matter
    rows = [
        {**row, "messages": row["messages"][:1], "chosen": row["messages"][1]["content"], "rejected": f"{row['id']} is not known"}
        | {"margin": 0.25 * number, "strength": None}
        for number, row in enumerate(models.arithmetic(6))
    ]
    batch = collate([preference(chat)(row) for row in rows], Numerics(attention="sdpa"), chat.pad_id)
    with torch.no_grad():
        scores_D = RewardModule(copy.deepcopy(model))(batch)
    ours, _ = losses.bradley_terry(scores_D[0::2], scores_D[1::2], *targets(rows, margin_weight), centering)

    chat.tokenizer.chat_template = without_the_last_line_break(chat)
    theirs = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=str(tmp_path),
            center_rewards_coefficient=centering or None,
            per_device_train_batch_size=len(rows),
            max_length=128,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_list(
            [
                {"prompt": row["messages"], "chosen": said(row["chosen"]), "rejected": said(row["rejected"])}
                | ({"margin": margin_weight * row["margin"]} if margin_weight else {})
                for row in rows
            ]
        ),
        processing_class=chat.tokenizer,
    )
    inputs = next(iter(theirs.get_train_dataloader()))
    with torch.no_grad():
        expected = theirs.compute_loss(model, inputs)
    assert ours.item() / len(rows) == pytest.approx(expected.item(), abs=1e-5)
    assert abs(expected.item() - 0.6931) > 1e-2
