"""Rollouts of `rlvr` by engines that are functions here."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from models import config_of

from pedigree.stages.rlvr.rewarding import Rewards
from pedigree.stages.rlvr.rolling import Prompt, Roller
from pedigree.stages.sampling.engines import Fleet
from pedigree.stages.sampling.sampler import Generation, Request
from pedigree.stages.verifiers import Verifying

PLAN: dict[str, Any] = {
    "algorithm": {"type": "grpo"},
    "steps": 9,
    "prompts_per_step": 3,
    "samples_per_prompt": 2,
    "sampling": {"max_tokens": 10},
    "max_prompt_length": 8,
    "optimizer": {"learning_rate": 1e-3},
}


def plan(**fields: Any) -> Any:
    """The config of a stage, by default a small one."""
    return config_of("rlvr", **(PLAN | fields))


def engine(answer: Callable[[int, Request], Generation], asked: list[Any] | None = None, **more: Any) -> Any:
    """An engine that answers by a function of a request's place and the request, the last request first.

    Args:
        asked: receives (requests, whether they are a chunk) of each call.
        more: further methods.
    """

    def stream(requests: Sequence[Request], sampling: Any, stop_ids: Any, arrived: Any, beat: Any = None, *, chunk: bool = False) -> None:
        if asked is not None:
            asked.append((requests, chunk))
        for place in reversed(range(len(requests))):
            arrived(place, answer(place, requests[place]))

    return SimpleNamespace(stream=stream, abandon=lambda: None, **more)


def roller(verifying: Verifying, config: Any, engines: Sequence[Any], prompts: list[Prompt], chat: Any, job: Any) -> Roller:
    return Roller(Fleet(engines), verifying, Rewards(config.reward, 12, {}), prompts, config, chat, job)
