"""What answers the policy between its turns: a program of the project, or a simulated user, which is a language model.

The user gets the conversation with roles exchanged. Its replies are in the job's log, so a resumed run asks nothing twice; equal
conversations on a prompt with equal seeds get equal replies.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pedigree.configs.methods.environment_programs import AnyEnvironment, SimulatedUser
from pedigree.configs.methods.language_model import Sampling
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError
from pedigree.data.records.records import Message
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.asking import Bound, Server, ask_server, mark_models
from pedigree.stages.sampling.endpoint import Reply
from pedigree.stages.sampling.policy_servers import PolicyServer, server_of
from pedigree.stages.sampling.sampler import seed_of
from pedigree.stages.verifiers.environments import Environments, Outcome, ProgramEnvironments, Reaction

PROBED: list[Message] = [{"role": "user", "content": "What follows?"}]
"""An observation for the check of the chat template."""
GREETING: Message = {"role": "user", "content": "Hi! How can I help you today?"}
"""What the user answers first, as in τ-bench, since many chat templates require a conversation to begin with the other side."""
EXCHANGED: dict[str, Any] = {"user": "assistant", "assistant": "user"}
MODEL = "model of the simulated user: "
"""Prefix of keys in the log that name the models of its replies."""


@dataclass(eq=False)
class UserTalk:
    """A conversation as the user sees it."""

    messages: list[Message]
    seed: int
    before: list[Message] | None
    """What precedes the message that the user is to open with; None if it does not open, or has."""
    answers: int = 0
    reply: "Future[Outcome]" = field(default_factory=Future)
    """The one that is waited for."""
    begun: float = 0.0


class UserTurns(list[UserTalk]):
    """Conversations whose replies are asked for together; see `asking.Questions`."""

    def __init__(self, talks: Iterable[UserTalk], sampling: Sampling) -> None:
        super().__init__(talks)
        self.sampling = sampling

    def messages(self, number: int) -> list[Message]:
        return self[number].messages

    def seed(self, number: int) -> int:
        return seed_of(self[number].seed, len(self[number].messages))

    def about(self, number: int) -> str:
        return str(number)


class SimulatedUsers:
    """The user in all conversations. A thread asks for all replies that are waited for, then for those waited for since.

    Raises:
        PedigreeError: a prompt lacks what the instructions name.
    """

    def __init__(self, config: SimulatedUser, server: Server, prompts: Iterable[Mapping[str, Any]], job: Job, log: AnswerLog) -> None:
        for prompt in prompts:
            config.system_text(prompt)
        self.config, self._server, self._job, self._log = config, server, job, log
        self._waiting = SimpleQueue[UserTalk | None]()
        Thread(target=self._run, daemon=True, name="simulated user").start()

    def identity(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")

    def reset(self, prompt: Mapping[str, Any], seed: int) -> "tuple[UserTalk, Future[Outcome]]":
        opens, asked = self.config.opens, prompt["messages"]
        known = asked[:-1] if opens else asked
        seen: list[Message] = [{"role": EXCHANGED[one["role"]], "content": one["content"]} for one in known if one["role"] in EXCHANGED]
        system: Message = {"role": "system", "content": self.config.system_text(prompt)}
        talk = UserTalk([system, GREETING, *seen], seed, known if opens else None)
        return talk, self._ask(talk, None if opens else Reaction(None))

    def step(self, episode: UserTalk, answer: str) -> "Future[Outcome]":
        episode.messages.append({"role": "user", "content": answer})
        episode.answers += 1
        return self._ask(episode, Reaction([], done=True) if episode.answers == self.config.max_turns else None)

    def end(self, episode: UserTalk) -> None: ...

    def close(self) -> None:
        """Wait for no reply, and mark the result if several models gave some."""
        self._waiting.put(None)
        models = [key.removeprefix(MODEL) for key in self._log if key.startswith(MODEL)]
        mark_models("user simulated", [Reply("", True, name) for name in models], self._job)

    def _ask(self, talk: UserTalk, known: Reaction | None) -> "Future[Outcome]":
        talk.reply, talk.begun = Future(), time.monotonic()
        self._waiting.put(talk) if known is None else talk.reply.set_result(known)
        return talk.reply

    def _run(self) -> None:
        while True:
            taken = [self._waiting.get()]
            while not self._waiting.empty():
                taken.append(self._waiting.get())
            turns = UserTurns([talk for talk in taken if talk], self.config.sampling)
            if len(turns) < len(taken):
                return
            each_alone = Bound(1.0, len(turns), "", "")
            try:
                replies = ask_server(self._server, turns, self._job, each_alone, self._log, lambda done, of: None)
                for talk, reply in zip(turns, replies, strict=True):
                    talk.reply.set_result(self._outcome(talk, reply))
            except BaseException as error:  # the boundary of the thread: those who wait raise it
                for talk in turns:
                    if not talk.reply.done():
                        talk.reply.set_exception(error)

    def _outcome(self, talk: UserTalk, reply: Reply | str) -> Outcome:
        if isinstance(reply, str):
            return f"the simulated user gave no reply: {reply}"
        if reply.model and MODEL + reply.model not in self._log:
            self._log.keep({MODEL + reply.model: True})
        done = self.config.stop is not None and self.config.stop in reply.text
        if not (done or reply.ended):
            return f"a reply of the simulated user exceeds environment.sampling.max_tokens {self.config.sampling.max_tokens}: raise it"
        if done and talk.before is not None:
            return "the simulated user ended the conversation before it began: change environment.instructions"
        before, talk.before = talk.before or [], None
        talk.messages.append({"role": "assistant", "content": reply.text})
        return Reaction([*before, {"role": "user", "content": reply.text}], done=done, seconds=time.monotonic() - talk.begun)


@contextmanager
def open_environments(
    given: AnyEnvironment | None, prompts: Sequence[Mapping[str, Any]], chats: Iterable[Chat], servers: Mapping[str, PolicyServer], job: Job
) -> Iterator[Environments | None]:
    """The environment on rank 0 until the end of the block, None elsewhere or without one. `servers` has the policy that plays the user.

    Raises:
        PedigreeError: it cannot be used.
        StageError: a chat template renders turns otherwise once more follow.
    """
    if given is None or job.rank != 0:
        yield None
        return
    first = prompts[0]
    for chat in chats:
        try:
            chat.following(first["messages"], "An answer.", PROBED, first.get("template_arguments"))
        except ChatError as error:
            raise StageError(f"prompt {first['id']} cannot begin a conversation of several turns: {error}") from error
    if isinstance(given, SimulatedUser):
        server = server_of(given.by, "user", servers, job)
        with AnswerLog(job) as log, closing(SimulatedUsers(given, server, prompts, job, log)) as users:
            yield users
        return
    verifiers = (prompt["verifier"] for prompt in prompts)
    with closing(ProgramEnvironments(given, job.source_files[given.path], verifiers, job.numerics.threads)) as environments:
        if given.trusted:
            job.note(f"{given.path} ran outside the sandbox (trusted: true)")
        yield environments
