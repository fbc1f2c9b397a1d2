"""A reference in bf16 is the policy as the trainer computes it, also for tokens far from the start."""

import copy

import models
import torch
from transformers import AutoModelForCausalLM

from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.batches import Document, collate
from pedigree.stages.training.models import frozen, load_policy


def test_only_weights_are_rounded(tmp_path):
    policy, numerics = models.tiny_policy(tmp_path), Numerics(threads=1)
    reference = frozen(load_policy(policy, numerics), torch.device("cpu"), torch.bfloat16)
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    # transformers' own way to a bf16 model leaves rotary frequencies alone, and so does DeepSpeed's
    theirs = AutoModelForCausalLM.from_pretrained(policy.payload, dtype=torch.bfloat16)
    longest = Document.of(tuple(3 + 7 * t % 200 for t in range(120)), (True,) * 120)
    expected = copy.deepcopy(reference)
    expected.model.model.rotary_emb = theirs.model.rotary_emb
    assert torch.equal(*(module(collate([(longest,)], numerics, 0))[0] for module in (reference, expected)))
    assert theirs.model.rotary_emb.inv_freq.dtype == torch.float32
