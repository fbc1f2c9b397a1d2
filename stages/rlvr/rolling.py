"""Rollouts of one step, on rank 0: prompts → answers → scores → rewards → the groups to train on."""

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.methods.policy_gradient import Keep
from pedigree.configs.methods.reward_terms import EnvironmentReward
from pedigree.configs.methods.training import Rlvr, Sampling
from pedigree.data.chat.chat import Chat
from pedigree.stages.job.job import Job, checkpoint_names
from pedigree.stages.rlvr.group_selection import (
    Choice,
    Cursor,
    choose,
    differ,
    replaceable,
    solved,
    success,
    upcoming,
    without_others,
)
from pedigree.stages.rlvr.hints import hinted, hopeless
from pedigree.stages.rlvr.kind import ROLLOUT_CHUNK
from pedigree.stages.rlvr.rewarding import Rewarded, Rewards
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.conversations import SampledTurns, Talk, begun, converse
from pedigree.stages.sampling.engines import Fleet
from pedigree.stages.sampling.sampler import Arrived, Generation, Request, request_key, seed_of
from pedigree.stages.verifiers import Outcome, Verdict, Verifying, ended
from pedigree.stages.verifiers.environments import Environments
from pedigree.stages.verifiers.reward_programs import Answered

RECORDS = "rollouts"
"""Folder of the recorded answers, one per step with the step's 0-based number."""
Prompt = tuple[dict[str, Any], list[int]]
"""A row with a verifier, and its token ids."""


@dataclass(frozen=True)
class Rollout:
    """One answer with its verifier score and reward; NaN if unknown."""

    prompt: Mapping[str, Any]
    prompt_ids: list[int]
    answer: Generation
    text: str
    score: float
    reward: float
    terms: dict[str, float | None]
    """As in `rewarding.Rewarded`."""
    cause: str = ""
    turns: SampledTurns | None = None
    """None without an environment."""
    replayed: bool = False
    """Whether an earlier step sampled it."""

    def stored(self) -> str:
        """For later steps, as JSON without the prompt."""
        return json.dumps(asdict(replace(self, prompt={}, replayed=True)))

    @classmethod
    def restored(cls, text: str, prompt: Mapping[str, Any]) -> "Rollout":
        given = json.loads(text)
        turns = given["turns"] and SampledTurns(**given["turns"])
        return cls(**{**given, "prompt": prompt, "answer": Generation(**given["answer"]), "turns": turns})

    @property
    def length(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.answer.response_ids) if self.turns is None else sum(self.turns.sampled)

    def turn_rewards(self, config: Rlvr) -> list[float] | None:
        """The reward of each turn: what the environment gave for it, and for the last one all else of R. None for one advantage."""
        if config.credit == "conversation" or self.turns is None:
            return None
        weight = sum(term.weight for term in config.reward.terms if isinstance(term, EnvironmentReward))
        earlier = [weight * reward for reward in self.turns.rewards[:-1]]
        return [*earlier, self.reward - sum(earlier)]


@dataclass(frozen=True)
class Group:
    """The answers to one prompt."""

    rollouts: list[Rollout]
    greedy: float = math.nan
    """Reward of the greedy answer, for algorithms that use it as baseline."""

    @property
    def rewards(self) -> list[float]:
        """NaN if unknown."""
        return [one.reward for one in self.rollouts]

    @property
    def scores(self) -> list[float]:
        """By the verifier; NaN if unknown."""
        return [one.score for one in self.rollouts]

    @property
    def hopeless(self) -> bool:
        return hopeless(self.scores)

    @property
    def pass_rate(self) -> float:
        """Mean verifier score of the answers that have one; 0 if none has."""
        return mean(present(self.scores))

    @property
    def success(self) -> Rollout | None:
        place = success(self.scores, self.rewards)
        return None if place is None else self.rollouts[place]

    @property
    def replays(self) -> bool:
        return any(one.replayed for one in self.rollouts)

    def replaying(self, stored: str | None) -> "list[Group]":
        """This group with a stored success in place of its last wrong answer; none if there is none, the group has one of its own, or the
        environment made another prompt of the row."""
        place = replaceable(self.scores, self.rewards)
        if stored is None or place is None:
            return []
        replaced = self.rollouts[place]
        one = Rollout.restored(stored, replaced.prompt)
        rollouts = [*self.rollouts[:place], one, *self.rollouts[place + 1 :]]
        return [replace(self, rollouts=rollouts)] if one.prompt_ids == replaced.prompt_ids else []

    def informative(self, keep: Keep | None) -> bool:
        """Whether some answers are right and some wrong, by their verifier; where it gave no score, by their rewards. The rewards of those
        that `keep` chooses differ, too."""
        scores = [one.reward if math.isnan(one.score) else one.score for one in self.rollouts]
        return differ(scores) and differ(without_others(self.rewards, len(self.rollouts), keep))


@dataclass(frozen=True)
class StepRollouts:
    """What a step trains on."""

    rollouts: list[Rollout]
    """Answers grouped by prompt."""
    greedy: list[float] | None
    numbers: dict[str, float]
    """Metrics of all answers that the step sampled for prompts without a hint."""
    cursor: Cursor
    """Where the next step's prompts begin."""
    tokens: int
    """Tokens of all answers that the step sampled."""
    successes: dict[str, str]
    """Prompt → a success that the step sampled, as `Rollout.stored`."""


@dataclass(frozen=True)
class Roller:
    """Rolls out steps, with everything that they share."""

    engines: Fleet
    verifying: Verifying
    rewards: Rewards
    prompts: list[Prompt]
    config: Rlvr
    chat: Chat
    job: Job
    environments: Environments | None = None
    successes: dict[str, str] = field(default_factory=dict)
    """As in `StepRollouts`, of all steps so far."""

    def step(self, cursor: Cursor, step: int) -> StepRollouts:
        """Roll out batches of prompts from a cursor on, until the step is complete."""
        wanted, resampling = self.config.prompts_per_step, self.config.algorithm.resampling
        keep = self.config.algorithm.keep if self.config.algorithm.compares else None
        coming = upcoming(cursor.position, len(self.prompts), self.config.seed, cursor.set_aside)
        tries, drawn, places = list[list[Group]](), list[Group](), list[tuple[int, int]]()
        batches, choice = 0, Choice([], 0, self.config.first_batch)
        with self._record(step) as record:
            while batch := list(islice(coming, choice.more)):
                tries += self._tries([self.prompts[row] for _, row in batch], step, record)
                drawn = [own[0] if own[-1].hopeless else own[-1] for own in tries]
                places += batch
                batches += 1
                informative = [group.informative(keep) for group in drawn]
                known = [bool(present(group.rewards)) for group in drawn]
                choice = choose(informative, known, wanted, batches, resampling)
        groups = [drawn[number] for number in choice.kept]
        fresh, replays = [own[0] for own in tries], sum(group.replays for group in drawn)
        numbers = reward_numbers([rollout for group in fresh for rollout in group.rollouts])
        if self.config.hints is not None:
            numbers["hopeless_groups"] = float(sum(group.hopeless for group in fresh))
            numbers["hinted_groups"] = float(sum(group is not own for group, own in zip(drawn, fresh, strict=True)) - replays)
        successes = dict[str, str]()
        if self.config.replay_successes:
            numbers["replayed_answers"] = float(sum(group.replays for group in groups))
            found = [group.success for group in fresh]
            successes = {one.prompt["id"]: one.stored() for one in found if one is not None}
            self.successes.update(successes)
        if resampling is not None:
            numbers |= {"generated_batches": float(batches), "resampled_prompts": float(len(drawn) - wanted)}
        threshold = self.config.no_resampling_pass_rate
        pass_rates = {places[number][1]: fresh[number].pass_rate for number in range(choice.used)}
        set_aside = solved(cursor.set_aside, pass_rates, threshold, len(self.prompts), wanted)
        if threshold is not None:
            numbers["set_aside_prompts"] = float(len(set_aside))
        greedy = None
        if self.config.algorithm.advantage == "greedy":
            greedy = [group.greedy for group in groups]
            numbers["greedy_reward"] = mean(present([group.greedy for group in fresh]))
        return StepRollouts(
            rollouts=[rollout for group in groups for rollout in group.rollouts],
            greedy=greedy,
            numbers=numbers,
            cursor=Cursor(places[choice.used - 1][0] + 1, set_aside),
            tokens=sum(rollout.length for own in tries for group in own if not group.replays for rollout in group.rollouts),
            successes=successes,
        )

    def _tries(self, batch: list[Prompt], step: int, record: AnswerLog | None) -> list[list[Group]]:
        """For each prompt its group, and after it that with a stored success, or those with the hints that were tried: of these all but the
        last are hopeless."""
        groups = self.roll_out(batch, step, record)
        tries = [[group, *group.replaying(self.successes.get(row["id"]))] for (row, _), group in zip(batch, groups, strict=True)]
        coming = [hinted(row, self.config, self.chat) for row, _ in batch]
        while asked := {
            place: prompt for place, own in enumerate(tries) if own[-1].hopeless and (prompt := next(coming[place], None)) is not None
        }:
            for place, group in zip(asked, self.roll_out([*asked.values()], step, record), strict=True):
                tries[place].append(group)
        return tries

    def roll_out(self, batch: list[Prompt], step: int, record: AnswerLog | None) -> list[Group]:
        """The groups of a batch of prompts, in order. Answers are verified while the engines generate others."""
        config, size = self.config, self.config.samples_per_prompt

        def answer(drawn: list[tuple[dict[str, Any], list[int], int]], samples: int, sampling: Sampling) -> list[Rollout]:
            self.job.doing("sampling")
            talks = self._begun(drawn, step)
            verdicts: dict[int, Future[Outcome]] = {}

            def seed(place: int, turn: int) -> int:
                prompt, _, index = drawn[place]
                return seed_of(config.seed, step, prompt["id"], index, *([turn] if turn else []))

            def ask(requests: list[Request], arrived: Arrived) -> None:
                self._answer(requests, sampling, arrived, step, record)

            def verify(place: int) -> None:
                verdicts[place] = self.verifying.begin(drawn[place][0]["verifier"] if config.reward.verifies else None, talks[place].text)

            converse(talks, self.environments, self.chat, seed, ask, verify, self._wait)
            answered: list[Answered] = []

            def beat() -> None:
                self.job.doing("verifying", len(answered))  # a verifier may take minutes; each has a time limit

            for place, talk in enumerate(talks):
                beat()
                score = score_of(drawn[place][0], ended(verdicts[place], beat))
                answered.append(talk.answered(None if math.isnan(score) else score))
            return [
                self._rollout(talk, own, rewarded)
                for talk, own, rewarded in zip(talks, answered, self.rewards.of(answered, samples), strict=True)
            ]

        rollouts = answer([(prompt, ids, index) for prompt, ids in batch for index in range(size)], size, config.sampling)
        greedy = [math.nan] * len(batch)
        if config.algorithm.advantage == "greedy":
            asked = [(prompt, ids, 0) for prompt, ids in batch]
            greedy = [one.reward for one in answer(asked, 1, config.sampling.model_copy(update={"temperature": 0.0}))]
        return [Group(rollouts[i * size : (i + 1) * size], greedy[i]) for i in range(len(batch))]

    def _begun(self, drawn: list[tuple[dict[str, Any], list[int], int]], step: int) -> list[Talk]:
        """Conversations on prompts, after the `reset` of the environment, if there is one."""
        if self.environments is None:
            return [Talk(prompt, ids) for prompt, ids, _ in drawn]
        longest = self.config.max_prompt_length
        starts = [(prompt, ids, seed_of(self.config.seed, step, prompt["id"])) for prompt, ids, _ in drawn]
        return begun(self.environments, starts, self.chat, longest, f"max_prompt_length {longest}", self._wait)

    def _rollout(self, talk: Talk, own: Answered, rewarded: Rewarded) -> Rollout:
        """If the environment failed, the whole reward is unknown."""
        reward, terms, cause = rewarded
        score = math.nan if own.score is None else own.score
        if failed := talk.cause or unused_reward(self.config, talk):
            print(f"no reward for a conversation on {talk.prompt['id']}: {failed}", flush=True)
            reward, cause = math.nan, failed
        return Rollout(talk.prompt, talk.prompt_ids, talk.whole, talk.text, score, reward, terms, cause, talk.turns)

    def _wait(self) -> None:
        self.job.doing("waiting for the environment")

    def _answer(self, requests: list[Request], sampling: Sampling, arrived: Arrived, step: int, record: AnswerLog | None) -> None:
        """Get all answers: in fixed chunks; or recorded ones from the record and the others continuously, each recorded as it arrives."""
        job, stop = self.job, [self.chat.eos_id]

        def beat(_: int) -> None:
            if self.config.asynchronous:  # the steps are the trainer's
                job.doing("generating rollouts")
            else:
                job.progress(step, self.config.steps)

        if record is None:
            self.engines.answer(requests, sampling, stop, arrived, beat, ROLLOUT_CHUNK)
            return
        common = digest({"job": job.key, "numerics": job.numerics.deciding(), "sampling": sampling.model_dump(), "step": step})
        keys = [digest([common, request_key(request)])[:32] for request in requests]
        missing = [place for place, key in enumerate(keys) if key not in record]
        mixed = digest([common, "mixed"])[:32]
        if 0 < len(missing) < len(keys) and mixed not in record:
            record.keep({mixed: True})  # for the attempt after the next kill, which may find all answers recorded
        if mixed in record:
            before = f"some answers of step {step + 1} are those of an interrupted attempt"
            mark = f"{before}: the others ran in other company, and may round otherwise"
            job.marks += [mark] if mark not in job.marks else []
        for place, key in enumerate(keys):
            if key in record:
                arrived(place, Generation(**record[key]))

        def new(number: int, one: Generation) -> None:
            record.keep({keys[missing[number]]: one.as_json()})
            arrived(missing[number], one)

        self.engines.answer([requests[place] for place in missing], sampling, stop, new, beat, None)

    @contextmanager
    def _record(self, step: int) -> Iterator[AnswerLog | None]:
        """The record of a step's answers, if `replay` asks for one. Those of steps before the oldest checkpoint are deleted."""
        if self.config.replay == "exact":
            yield None
            return
        oldest = next((int(name.removeprefix("step-")) for name in checkpoint_names(self.job.folder)), 0)
        for old in (self.job.folder / RECORDS).glob("step-*"):
            if int(old.name.removeprefix("step-")) < oldest:
                shutil.rmtree(old)
        with AnswerLog(self.job, record_of(self.job, step)) as record:
            yield record


def record_of(job: Job, step: int) -> Path:
    """Folder of a step's recorded answers."""
    return job.folder / RECORDS / f"step-{step:06d}"


def unused_reward(config: Rlvr, talk: Talk) -> str:
    """Why the environment's rewards make that of a conversation unknown; empty if they do not."""
    if talk.earned is not None and not any(isinstance(term, EnvironmentReward) for term in config.reward.terms):
        return "the environment returned a reward, and reward.terms has no {type: environment}: add it, or return None"
    return ""


def score_of(prompt: dict[str, Any], verdict: Outcome) -> float:
    """The verifier's score; NaN if the answer has no verifier, or its verifier cannot run, which says nothing about the answer."""
    if isinstance(verdict, Verdict):
        return verdict.score
    if verdict is not None:
        print(f"no score for an answer to {prompt['id']}: {verdict}", flush=True)
    return math.nan


def reward_numbers(rollouts: list[Rollout]) -> dict[str, float]:
    """Metrics of one step's rollouts: rewards and their parts, lengths, truncation."""
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if not math.isnan(rollout.score):
            parts[f"score_{rollout.prompt['verifier']['name']}"].append(rollout.score)
        for name, value in rollout.terms.items():
            if value is not None and not math.isnan(value):
                parts[f"reward_{name}"].append(value)
    rewards = [rollout.reward for rollout in rollouts]
    turns = [rollout.turns for rollout in rollouts if rollout.turns is not None]
    return {
        "reward": mean(present(rewards)),
        **{name: mean(values) for name, values in sorted(parts.items())},
        "missing_rewards": float(len(rewards) - len(present(rewards))),
        "response_length": mean([float(rollout.length) for rollout in rollouts]),
        "truncated": mean([float(rollout.answer.finish_reason == "length") for rollout in rollouts]),
        **(numbers_of(turns) if turns else {}),
    }


def numbers_of(turns: list[SampledTurns]) -> dict[str, float]:
    """Metrics of conversations: mean number of answers, and total seconds of the environment's work."""
    return {"turns": mean([float(one.answers) for one in turns]), "environment_seconds": sum(one.seconds for one in turns)}


def present(rewards: list[float]) -> list[float]:
    """The rewards that are not missing."""
    return [reward for reward in rewards if not math.isnan(reward)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
