"""An independent implementation gets the same SFT loss from the same conversations: template, masks, log-probs and mean over tokens."""

import models
import pytest
import torch
from datasets import Dataset

from pedigree.configs.language.execution import Numerics
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Conversations
from pedigree.stages.core.batches import collate
from pedigree.stages.training.logprobs import PolicyModule
from pedigree.stages.training.models import load_policy

pytestmark = pytest.mark.slow

CASES = {
    "assistant": {"assistant_only_loss": True},
    "last_turn": {"completion_only_loss": True},
    "all": {},
}


def rows():
    """Conversations of one and two questions."""
    further = [{"role": "user", "content": "And twice that?"}, {"role": "assistant", "content": "I do not know."}]
    return [{**row, "messages": row["messages"] + further * (i % 2)} for i, row in enumerate(models.arithmetic(6))]


@pytest.mark.parametrize(("train_on", "settings"), CASES.items(), ids=CASES)
def test_sft_loss_is_trls(tmp_path, policy, train_on, settings):
    from trl import SFTConfig, SFTTrainer

    numerics, chat = Numerics(), Chat(policy.payload)
    module: PolicyModule = load_policy(policy, numerics)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():  # a fresh model gives every token nearly the same probability
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    units = models.units(rows(), Conversations(train_on), chat)
    with torch.no_grad():
        logps_N, _ = module(collate(units, numerics, chat.pad_id))
    ours = -logps_N.sum().item() / sum(doc.num_trained for (doc,) in units)

    if train_on == "last_turn":  # the line break that ChatML puts behind an answer is a part of TRL's completions, not of ours
        further = r"{% if not loop.last %}{{ '\n' }}{% endif %}"
        chat.tokenizer.chat_template = chat.template.replace(r"{{ '\n' }}{% else", further + "{% else")
        assert chat.tokenizer.chat_template != chat.template
        data = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows()]
    else:
        data = [{"messages": row["messages"]} for row in rows()]
    module.model.set_attn_implementation("sdpa")
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(data),
        max_length=128,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **settings,
    )
    theirs = SFTTrainer(model=module.model, args=arguments, train_dataset=Dataset.from_list(data), processing_class=chat.tokenizer)
    with torch.no_grad():
        expected = theirs.compute_loss(module.model, next(iter(theirs.get_train_dataloader())))
    assert ours == pytest.approx(expected.item(), abs=1e-5)
