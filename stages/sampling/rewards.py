"""Score answers with a reward model, at the last token of the rendered conversation."""

import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pedigree.configs.base.frozen import Dtype
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError
from pedigree.data.chat.reward_stats import FILE, reads_closed
from pedigree.data.records import records
from pedigree.stages.core.batches import Document, document, share_prompts
from pedigree.stages.core.ensembles import Member
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.answer_log import keys_of
from pedigree.stages.sampling.frozen_copies import FrozenModel, Part, give_back, in_parts
from pedigree.stages.sampling.sampler import model_context
from pedigree.stages.training.feed import GlobalBatch, feed
from pedigree.stages.training.models import frozen, load_reward_model
from pedigree.stages.training.probe import probe

PART = 1024
"""Answers scored and saved together; a kill loses at most one part, and one part's tokens are in memory."""


class RawReward(NamedTuple):
    """The raw reward of an answer."""

    value: float | None
    reason: str
    """Why there is no value; empty if there is one."""


class FrozenRewardModel(FrozenModel):
    """A reward model for inference, loaded at the first answer that it can read."""

    def __init__(self, payload: Path, dtype: Dtype, job: Job) -> None:
        super().__init__(job)
        self._payload = payload
        self._dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        self._chat, self._longest, self._whole = Chat(payload), model_context(payload), reads_closed(payload)

    @cached_property
    def _module(self) -> torch.nn.Module:
        with self._job.busy("loading the model"):
            module = frozen(load_reward_model(self._payload, self._job.numerics), torch.device("cpu"), self._dtype)
            self._on_host = [parameter.data for parameter in module.parameters()]
            probe(module.to(self._device), self._job.numerics, self._device)
        return module

    def rest(self) -> None:
        """Weights never change, so those in host memory, which may be pages of the file, take the place of those on the device."""
        if "_module" in vars(self):
            for parameter, on_host in zip(self._module.parameters(), self._on_host, strict=True):
                parameter.data = on_host
            give_back(self._device)

    def rewards(self, answers: Sequence[dict[str, Any]], progress: Callable[[int], None]) -> tuple[list[float | None], dict[int, str]]:
        """(raw rewards; index → why there is none).

        Batches depend only on the answers, so results are bitwise reproducible. Successive answers to one prompt share its computation.

        Args:
            answers: each a `text` after its `messages`; an answer that `calls` tools has no reward.
            progress: called with the number of scored answers.
        """
        rewards: list[float | None] = [None] * len(answers)
        problems: dict[int, str] = {}
        documents = list(self._documents(answers, problems))
        if not documents:
            return rewards, problems
        module, numerics, done = self._module.to(self._device), self._job.numerics, 0
        groups = groupby(documents, key=lambda one: one[1].ids[: one[1].prompt_length].tobytes())
        units = [unit for _, group in groups for unit in share_prompts([one for _, one in group], numerics)]
        rest = (place for place, _ in documents)
        places = [list(islice(rest, len(unit))) for unit in units]
        with torch.no_grad(), feed([GlobalBatch(units)], 0, 1, numerics, self._chat.pad_id, self._device) as fed:
            for micro_batch in fed.micro_batches():
                scored = [place for index in micro_batch.units for place in places[index]]
                for place, reward in zip(scored, module(micro_batch.batch).tolist(), strict=True):
                    if math.isfinite(reward):
                        rewards[place] = reward
                    else:
                        problems[place] = f"the reward is {reward}"
                done += len(scored)
                progress(done)
        return rewards, problems

    def score(self, rows: Sequence[dict[str, Any]], progress: Callable[[int], None]) -> list[RawReward]:
        raw, problems = self.rewards(rows, progress)
        return [RawReward(one, problems.get(place, "")) for place, one in enumerate(raw)]

    def _documents(self, answers: Sequence[dict[str, Any]], problems: dict[int, str]) -> Iterator[tuple[int, Document]]:
        """(index, tokens) of the answers that the model can read; reasons for the others go to `problems`."""
        for place, row in enumerate(answers):
            self._job.doing("tokenizing", place, len(answers), "answers")
            try:
                if row.get("calls"):
                    raise ChatError("the answer calls tools, for which a reward model that reads texts has no form")
                form = {"arguments": row.get("template_arguments"), "scored": self._whole}
                found = document(*self._chat.answer(row["messages"], row["text"], ended=records.ended(row), **form))
                if not found.num_trained:
                    raise ChatError("the answer was cut off before it had any text")
                if len(found) > self._longest:
                    raise ChatError(f"prompt and answer have {len(found)} tokens, the reward model's context is {self._longest}")
            except ChatError as error:
                problems[place] = str(error)
            else:
                yield place, found


def part_of(model: Artifact, answers: list[dict[str, Any]], dtype: Dtype, job: Job) -> Part:
    """Answers that pass through a model together. Their rewards depend on weights, answers, dtype and numerics."""
    decides = {"weights": model.record.content, "answers": answers, "dtype": dtype, "numerics": job.numerics.deciding()}
    return Part(keys_of(decides, len(answers)), answers)


def rewards_in_parts(
    model: Artifact, answers: Iterable[dict[str, Any]], dtype: Dtype, job: Job, progress: Callable[[int], None]
) -> Generator[list[RawReward], None, None]:
    """Score any number of answers, `PART` at a time; finished parts are kept across restarts."""

    def parts() -> Iterator[Part]:
        rest = iter(answers)
        while part := list(islice(rest, PART)):
            yield part_of(model, part, dtype, job)

    with closing(in_parts(partial(FrozenRewardModel, model.payload, dtype), parts(), job, progress)) as scored:
        for part in scored:
            yield [RawReward(*one) for one in part]


def ask_all(
    models: Mapping[str, Artifact],
    answers: Sequence[dict[str, Any]],
    dtype: Dtype,
    job: Job,
    missing: Callable[[str, dict[int, str]], None],
) -> dict[str, Member]:
    """Label → rewards of each model, run one after the other. `missing` receives a label and place → reason of missing rewards.

    Raises:
        StageError: a model's statistics are missing.
    """
    statistics = {label: reward_statistics(model.payload) for label, model in models.items()}
    members: dict[str, Member] = {}
    for label, model in models.items():
        raw: list[float | None] = []

        def progress(done: int, before: int = len(members) * len(answers)) -> None:
            job.progress(before + done, len(models) * len(answers))

        with closing(rewards_in_parts(model, answers, dtype, job, progress)) as parts:
            for part in parts:
                missing(label, {place: reward.reason for place, reward in enumerate(part, len(raw)) if reward.value is None})
                raw += [reward.value for reward in part]
        members[label] = Member(raw, *statistics[label])
    return members


def reward_statistics(payload: Path) -> tuple[float, float]:
    """(mean, standard deviation) of the reward model on its held-out answers.

    Raises:
        StageError: they are missing or unusable for normalization.
    """
    try:
        found = json.loads((payload / FILE).read_text())
        mean, std = float(found["mean"]), float(found["std"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StageError(f"the reward model has no usable reward_stats.json ({error}): train it with a `reward_model` stage") from error
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise StageError(f"reward_stats.json has mean {mean} and std {std}, but both must be finite and std > 0: retrain the reward model")
    return mean, std
