"""Policies of the recipe that are queried while a stage works, a judge or a simulated user: each in a vLLM engine of its own."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from threading import Lock
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.work import SamplingPlan
from pedigree.configs.language.execution import gpus_taken
from pedigree.configs.methods.language_model import Sampling, Served, ServedPolicy
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.data.records.records import Message
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.sampling.asking import Endpoint, Outcomes, Server, tokenized
from pedigree.stages.sampling.endpoint import NoReply, Reply
from pedigree.stages.sampling.engines import gpus_of, start
from pedigree.stages.sampling.sampler import Child, Generation, Request, Sampler, engine_settings, model_context

TIMED = "the policy at {}: which replies were computed together depended on time, so another run has other bits"


class PolicyServer:
    """A policy that answers questions; threads take turns."""

    def __init__(self, port: str, policy: Artifact, engine: Sampler) -> None:
        self.name = f"the policy at {port}"
        self._chat, self._context, self._content = Chat(policy.payload), model_context(policy.payload), policy.record.content
        self._engine, self._turn = engine, Lock()

    def request(self, messages: list[Message], sampling: Sampling, seed: int) -> tuple[str, Any] | NoReply:
        ids = tokenized(self._chat, messages, sampling, self._context)
        if isinstance(ids, str):
            return NoReply(ids, refused=True)
        return digest([self._content, sampling.model_dump(), ids, seed]), Request(ids, seed)

    def ask(self, requests: Iterable[tuple[int, Any]], sampling: Sampling, arrived: Outcomes, wait: Callable[[], None]) -> None:
        """
        Raises:
            StageError: vLLM cannot serve the policy.
            EngineLost: the engine died or stopped responding.
        """
        numbers, given = [], []
        for number, request in requests:
            numbers.append(number)
            given.append(request)

        def found(place: int, answer: Generation) -> None:
            ended = records.ended({"finish_reason": answer.finish_reason})
            arrived(numbers[place], Reply(self._chat.decode(answer.response_ids), ended))

        if given:
            with self._turn:
                self._engine.stream(given, sampling, [self._chat.eos_id], found, lambda _: wait())


@contextmanager
def serving(plans: Sequence[SamplingPlan], inputs: Inputs, job: Job, *, beside: bool = False) -> Iterator[Mapping[str, PolicyServer]]:
    """Port → server of the policies that a stage queries, on rank 0 alone. Their GPUs follow those of the stage, whose own engines may work
    `beside` training."""
    with ExitStack() as opened:
        servers: dict[str, PolicyServer] = {}
        for number, plan in enumerate(plans if job.rank == 0 else ()):
            policy = only(inputs, plan.port)
            settings = engine_settings(
                policy.payload,
                dtype=plan.dtype,
                context=model_context(policy.payload),
                numerics=job.numerics,
                placement=job.placement,
            )
            gpus = gpus_of(job.numerics, number, gpus_taken(job.numerics, job.placement, beside=beside))
            engine = opened.enter_context(closing(Child(settings, start(job.numerics, gpus))))
            servers[plan.port] = PolicyServer(plan.port, policy, engine)
            job.note(TIMED.format(plan.port))
        yield servers


def server_of(by: Served, port: str, servers: Mapping[str, PolicyServer], job: Job) -> Server:
    """What answers: the policy at a port, or an endpoint."""
    return servers[port] if isinstance(by, ServedPolicy) else Endpoint(by, job.placement)
