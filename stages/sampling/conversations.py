"""Conversations with an environment: in each round the engines generate the next answer of every open conversation.

The tokens of answers stay as sampled; observations are tokenized as the chat template renders them after the answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pedigree.configs.methods.environment_programs import Partner
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError
from pedigree.data.records.records import FinishReason, Message
from pedigree.stages.sampling.sampler import Arrived, Generation, Request
from pedigree.stages.verifiers import ended as awaited
from pedigree.stages.verifiers.environments import Environments, Outcome
from pedigree.stages.verifiers.reward_programs import Answered, Value


@dataclass(frozen=True)
class SampledTurns:
    """The turns of a conversation."""

    sampled: list[bool]
    """For each token after the prompt, whether the policy sampled it."""
    answers: int
    messages: list[Message]
    """The whole conversation."""
    rewards: list[float]
    """Of each turn."""
    seconds: float
    """Of work of the environment."""


@dataclass(frozen=True)
class Transcript:
    """A finished conversation with an environment, as evaluations and samples record it."""

    messages: list[Message]
    """Those before the last answer."""
    text: str
    """Of the last answer."""
    ids: list[int]
    """Tokens of the last answer."""
    finish_reason: FinishReason
    turns: int
    tokens: int
    """That the policy sampled, in all turns."""
    earned: Value
    """As in `Answered`."""

    @property
    def failed(self) -> bool:
        """Whether the environment failed."""
        return isinstance(self.earned, str)

    @property
    def reward(self) -> float | str:
        """The sum of the environment's rewards; a text is the cause of an unknown one."""
        if self.earned is None:
            return "the environment gave no reward: set `scored_by: verifier`, or return one"
        return self.earned if isinstance(self.earned, str) else float(self.earned)

    def answered(self, prompt: Mapping[str, Any], score: float | None) -> Answered:
        """The last answer, to the conversation before it."""
        return Answered({**prompt, "messages": self.messages}, self.text, self.ids, self.finish_reason, score, self.earned)


class Talk:
    """One conversation, up to its last answer."""

    def __init__(self, prompt: Mapping[str, Any], prompt_ids: list[int], episode: Any = None) -> None:
        self.prompt, self.prompt_ids, self.episode = prompt, prompt_ids, episode
        self.temperature: float | None = None
        """As in `Request`."""
        self.messages: list[Message] = prompt["messages"] if episode else []
        """With an environment, those before the last answer."""
        self.text = ""
        """Of the last answer."""
        self.answers: list[Generation] = []
        self.between: list[list[int]] = []
        """Tokens after each answer but the last."""
        self.rewards: list[float | None] = []
        """Of each turn; None where the environment gave none."""
        self.cut = False
        """Whether it ended because an observation or answer was too long."""
        self.cause = ""
        """Why its reward is unknown."""
        self.seconds = 0.0
        """Of work of the environment."""

    @property
    def finish_reason(self) -> FinishReason:
        return "length" if self.cut else self.answers[-1].finish_reason

    @property
    def whole(self) -> Generation:
        """Everything after the prompt as one answer, with log-probs of 0 for what was not sampled."""
        answers = self.answers
        ids, logprobs = list(answers[0].response_ids), list(answers[0].logprobs)
        for context, answer in zip(self.between, answers[1:], strict=True):
            ids += [*context, *answer.response_ids]
            logprobs += [*([0.0] * len(context)), *answer.logprobs]
        return Generation(ids, logprobs, self.finish_reason, answers[0].version, self._changes())

    def _changes(self) -> list[list[int]]:
        """`Generation.changes` of the whole."""
        found, version, start = list[list[int]](), self.answers[0].version, 0
        for answer, context in zip(self.answers, [*self.between, []], strict=True):
            for newer, place in ([answer.version, 0], *answer.changes):
                found += [[newer, start + place]] if newer != version else []
                version = newer
            start += len(answer.response_ids) + len(context)
        return found

    @property
    def turns(self) -> SampledTurns | None:
        """None without an environment."""
        if self.episode is None:
            return None
        sampled = [True] * len(self.answers[0].response_ids)
        for context, answer in zip(self.between, self.answers[1:], strict=True):
            sampled += [False] * len(context) + [True] * len(answer.response_ids)
        messages = [*self.messages, {"role": "assistant", "content": self.text}]
        return SampledTurns(sampled, len(self.answers), messages, [reward or 0.0 for reward in self.rewards], self.seconds)

    @property
    def transcript(self) -> Transcript:
        """Of a conversation with an environment."""
        last, tokens = self.answers[-1], sum(len(answer.response_ids) for answer in self.answers)
        turns = len(self.answers)
        return Transcript(self.messages, self.text, last.response_ids, self.finish_reason, turns, tokens, self.earned)

    @property
    def earned(self) -> float | str | None:
        """Sum of the environment's rewards; None if it gave none, the cause if it failed."""
        given = [reward for reward in self.rewards if reward is not None]
        return self.cause or (sum(given) if given else None)

    def request(self, seed: int) -> Request:
        """For the next answer."""
        ids = list(self.prompt_ids)
        for answer, context in zip(self.answers, self.between, strict=True):
            ids += [*answer.response_ids, *context]
        return Request(ids, seed, self.temperature)

    def answered(self, score: float | None) -> Answered:
        """The last answer, to the conversation before it."""
        last = self.answers[-1]
        prompt = {**self.prompt, "messages": self.messages} if self.episode else self.prompt
        return Answered(prompt, self.text, last.response_ids, self.finish_reason, score, self.earned)

    def begin(self, reaction: Outcome, chat: Chat, longest: int, bound: str) -> None:
        """Apply what `reset` returned; `longest` and `bound` as in `begun`. After a failure the original prompt is answered, and its reward
        is unknown."""
        if isinstance(reaction, str):
            self.cause = reaction
            return
        self.seconds += reaction.seconds
        made, last = reaction.messages, self.messages[-1]
        if made is None:
            return
        messages = [*self.messages[:-1], {**last, "content": last["content"] + made}] if isinstance(made, str) else made
        try:
            ids = chat.prompt(messages, self.prompt.get("template_arguments"))
        except ChatError as error:
            self.cause = f"what reset returned cannot be asked: {error}"
            return
        if len(ids) > longest:
            self.cause = f"the prompt has {len(ids)} tokens after reset, more than {bound}: raise it, or return less"
            return
        self.messages, self.prompt_ids = messages, ids

    def follow(self, reaction: Outcome, chat: Chat, config: Partner) -> bool:
        """Apply what `step` returned; returns whether another answer is due."""
        if isinstance(reaction, str):
            self.cause = reaction
            return False
        self.seconds += reaction.seconds
        self.rewards.append(reaction.reward)
        if reaction.done or len(self.answers) == config.max_turns or self.answers[-1].finish_reason == "length":
            return False
        assert isinstance(reaction.messages, list)
        try:
            ids = chat.following(self.messages, self.text, reaction.messages, self.prompt.get("template_arguments"))
        except ChatError as error:
            self.cause = f"what the environment says cannot follow the answer: {error}"
            return False
        if len(ids) > config.max_observation:
            self.cut = True
            return False
        self.between.append(ids)
        self.messages = [*self.messages, {"role": "assistant", "content": self.text}, *reaction.messages]
        return True


def begun(
    environments: Environments,
    drawn: Iterable[tuple[Mapping[str, Any], list[int], int]],
    chat: Chat,
    longest: int,
    bound: str,
    beat: Callable[[], None],
) -> list[Talk]:
    """Conversations after the `reset` of the environment.

    Args:
        drawn: prompt, its tokens, and the seed of the environment.
        longest: maximum tokens of a prompt, and the name of that `bound`.
        beat: called while waiting for the environment.
    """
    opened = [(prompt, ids, environments.reset(prompt, seed)) for prompt, ids, seed in drawn]
    talks = [Talk(prompt, ids, episode) for prompt, ids, (episode, _) in opened]
    for talk, (*_, (_, reaction)) in zip(talks, opened, strict=True):
        talk.begin(awaited(reaction, beat), chat, longest, bound)
    return talks


def converse(
    talks: Sequence[Talk],
    environments: Environments | None,
    chat: Chat,
    seed: Callable[[int, int], int],
    ask: Callable[[list[Request], Arrived], None],
    ended: Callable[[int], None],
    beat: Callable[[], None],
) -> None:
    """Continue conversations to their ends. Each round requests the answers of all open ones in a fixed order, so that it can be repeated.

    Args:
        environments: None for conversations of one answer.
        seed: called with a conversation's place and the number of its answer.
        ask: called with requests; it passes each answer on as it arrives.
        ended: called with the place of a conversation after its last answer.
        beat: called while waiting for the environment.
    """
    going = list(range(len(talks)))
    while going:
        reactions: dict[int, Future[Outcome]] = {}

        def arrived(number: int, answer: Generation, going: list[int] = going, reactions: dict[int, Any] = reactions) -> None:
            talk = talks[going[number]]
            talk.answers.append(answer)
            talk.text = chat.decode(answer.response_ids)
            if environments and talk.episode and not talk.cause:
                reactions[going[number]] = environments.step(talk.episode, talk.text)
            else:
                ended(going[number])

        ask([talks[place].request(seed(place, len(talks[place].answers))) for place in going], arrived)
        going = [place for place in going if place in reactions]
        for place in [*going]:
            assert environments
            if not talks[place].follow(awaited(reactions[place], beat), chat, environments.config):
                going.remove(place)
                ended(place)
    for talk in talks:
        if environments and talk.episode:
            environments.end(talk.episode)
