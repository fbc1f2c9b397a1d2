"""Rollouts of a step as mini-batches and micro-batches, with their tensors; the update is in `policy_update.py`, with the shapes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise

import numpy as np
import torch
from torch import Tensor

from pedigree.configs.language.execution import Numerics
from pedigree.stages.core import policy_losses as pg
from pedigree.stages.core.batches import Document, MicroBatch, Unit, document, share_prompts
from pedigree.stages.training.feed import GlobalBatch, PreparedMicroBatch


@dataclass(frozen=True)
class TrainingSample:
    """One rollout with its reward."""

    prompt: str
    """Prompt id."""
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    """Token ids of the answer."""
    logprobs: Sequence[float]
    """The sampler's log-prob of each of `ids`."""
    reward: float
    """NaN if missing."""
    masked: bool = False
    """Not in the loss; the reward counts in the advantages of its group."""
    sampled: Sequence[bool] | None = None
    """Which of `ids` the policy sampled; None: all. Replies of an environment are context only: losses, penalties, ratios,
    advantages, returns and metrics use the sampled tokens, as if these followed each other directly (verl,
    `compute_gae_advantage_return`; TRL, `tool_mask`)."""
    turn_rewards: Sequence[float] | None = None
    """Parts of the reward, for advantages per turn: that of each run of sampled tokens."""

    @property
    def trained(self) -> Sequence[bool]:
        return [True] * len(self.ids) if self.sampled is None else self.sampled

    @property
    def turns(self) -> list[int]:
        """The turn of each sampled token."""
        begun = accumulate(own and not before for before, own in pairwise([False, *self.trained]))
        return [number - 1 for number in compress(begun, self.trained)]

    @property
    def length(self) -> int:
        """|y|, in sampled tokens."""
        return len(self.ids) if self.sampled is None else sum(self.sampled)


@dataclass(frozen=True)
class RolloutMicroBatch:
    """One forward pass of this rank over rollouts, with all per-token quantities."""

    batch: MicroBatch
    weight: float
    """0 for a repeated pass that only keeps the ranks in step."""
    mini_batch_tokens: int
    """Trained tokens of the mini-batch over all ranks."""
    max_length: int
    """Tokens of the longest answer."""
    sample_D: Tensor
    """Index of each answer among the step's samples."""
    token_weights_N: Tensor
    """Weight of each token in the loss."""
    sampler_logps_N: Tensor
    turns_N: Tensor | None = None
    """Turn of each token, for advantages per turn."""
    old_logps_N: Tensor | None = None
    entropy_N: Tensor | None = None
    """Entropy of the old policy."""
    reference_logps_N: Tensor | None = None
    teacher_logps_N: Tensor | None = None
    values_N: Tensor | None = None
    """Values before the first update."""
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None
    entropy_weights_N: Tensor | None = None
    """Weight of each token in the mean entropy of the mini-batch."""
    bonus_N: Tensor | None = None
    """The same times α, if the loss has an entropy bonus."""


def mini_batches(groups: list[list[int]], count: int, seed: str) -> list[list[list[int]]]:
    """Groups shuffled into `count` mini-batches of nearly equal size; fewer if there are fewer groups."""
    if count > 1:
        groups = random.Random(seed).sample(groups, len(groups))
    edges = [len(groups) * i // count for i in range(count + 1)]
    return [groups[start:end] for start, end in pairwise(edges) if end > start]


@dataclass(frozen=True)
class MiniBatchPlan:
    """Division of a mini-batch into micro-batches; the same on every rank."""

    samples: Sequence[TrainingSample]
    """All samples of the step."""
    indices: Sequence[int]
    """Indices in `samples` of the answers to compute, grouped by prompt."""
    units: Sequence[Unit]
    """The same answers, grouped by forward pass."""
    unit_starts: Sequence[int]
    """Start of each unit in `indices`."""
    token_weights_D: np.ndarray
    """For each of `indices`, the loss weight of each of its tokens."""
    num_tokens: int
    """Trained tokens of all of `indices`."""

    @classmethod
    def of(
        cls,
        samples: Sequence[TrainingSample],
        groups: list[list[int]],
        skipped: frozenset[int],
        aggregation: str,
        max_tokens: int,
        ranks: int,
        numerics: Numerics,
    ) -> "MiniBatchPlan":
        """Plan a mini-batch. `groups` has the indices of the answers to each prompt; `skipped` those that only count in the divisor."""
        counted = [index for group in groups for index in group]
        lengths_D = torch.tensor([0 if samples[index].masked else samples[index].length for index in counted])
        weights_D = pg.token_weights(aggregation, lengths_D, len(groups), max_tokens)
        computed = [[index for index in group if index not in skipped] for group in groups]
        indices = [index for group in computed for index in group]
        documents = [document(samples[index].prompt_ids, samples[index].ids, samples[index].sampled) for index in indices]
        units = prompt_sharing_units(documents, [len(group) for group in computed], ranks, numerics)
        weights_D = weights_D[[place for place, index in enumerate(counted) if index not in skipped]]
        num_tokens = sum(samples[index].length for index in indices)
        return cls(samples, indices, units, [0, *accumulate(len(unit) for unit in units)], weights_D.numpy(), num_tokens)

    def global_batch(self) -> GlobalBatch:
        return GlobalBatch(self.units, self._token_tensors)

    def micro_batch(self, prepared: PreparedMicroBatch) -> RolloutMicroBatch:
        max_length = max(self.samples[self.indices[answer]].length for answer in self._answers(prepared.units))
        return RolloutMicroBatch(prepared.batch, prepared.weight, self.num_tokens, max_length, **prepared.extras)

    def _answers(self, units: Sequence[int]) -> list[int]:
        """Places in `indices` of the answers in these units."""
        return [answer for unit in units for answer in range(self.unit_starts[unit], self.unit_starts[unit + 1])]

    def _token_tensors(self, units: Sequence[int]) -> dict[str, Tensor]:
        answers = self._answers(units)
        samples = [self.samples[self.indices[answer]] for answer in answers]
        by_turn = samples[0].turn_rewards is not None
        return {
            **({"turns_N": torch.tensor([turn for sample in samples for turn in sample.turns])} if by_turn else {}),
            "sample_D": torch.tensor([self.indices[answer] for answer in answers]),
            "token_weights_N": torch.from_numpy(np.repeat(self.token_weights_D[answers], [sample.length for sample in samples])),
            "sampler_logps_N": torch.tensor([logp for sample in samples for logp in compress(sample.logprobs, sample.trained)]),
        }


def prompt_sharing_units(documents: Sequence[Document], group_sizes: Sequence[int], ranks: int, numerics: Numerics) -> list[Unit]:
    """Group answers to the same prompt into units that share a forward pass: as large as fit, but small enough to occupy every rank.
    `documents` are grouped by prompt, in groups of these sizes."""
    max_answers = max(1, len(documents) // ranks)
    units: list[Unit] = []
    for start, end in pairwise([0, *accumulate(group_sizes)]):
        for first in range(start, end, max_answers):
            units += share_prompts(documents[first : min(end, first + max_answers)], numerics)
    return units
