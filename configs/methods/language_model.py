"""Config of the language model that a stage queries, a policy of the recipe or a server, and of sampling from it."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from pedigree.configs.base.frozen import Arrived, Dtype, Frozen, added
from pedigree.configs.base.shrink import Cut
from pedigree.configs.base.work import MAX_RUNNING, SamplingPlan


class Sampling(Frozen):
    """Sampling parameters. Temperature 0 is greedy decoding."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold; 1 disables it."""
    max_tokens: int = Field(ge=1)
    """Maximum answer length in tokens."""


def endpoint_url(value: str) -> str:
    """Validate `http(s)://HOST[:PORT][/PATH]`; strips trailing slashes."""
    parts = urlsplit(value)
    if "@" in parts.netloc or parts.query or parts.fragment:  # omit the value from the message: it may contain a password
        raise ValueError("a URL must not contain credentials or options: set the key in the environment (see docs/judging.md)")
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", value):
        raise ValueError(f"{value!r} is not http://HOST:PORT/PATH or https://HOST/PATH, e.g. https://api.openai.com/v1")
    _ = parts.port  # raises if it is not a number
    return value.rstrip("/")


def key_variable(base_url: str) -> str:
    """Name of the environment variable with a server's API key. The name contains the host, so the key is never sent to any other host,
    whatever the recipe. `https://api.openai.com/v1` → `PEDIGREE_API_OPENAI_COM_KEY`; a hyphen becomes two underscores, an underscore
    three."""
    host = (urlsplit(base_url).hostname or "").upper().replace("_", "___").replace("-", "__")
    return f"PEDIGREE_{re.sub('[^A-Z0-9_]', '_', host)}_KEY"


class ByPolicy(Frozen):
    """A policy of the recipe, at the input `judge` or `writer`, served by vLLM inside the job."""

    type: Literal["policy"]
    chunk_size: int = Field(default=64, ge=1)
    """Requests submitted together: the unit of generation and resume."""
    dtype: Dtype = "bf16"
    """Dtype for inference."""


class ByEndpoint(Frozen):
    """A server with OpenAI's chat completions API: OpenAI, vLLM or any other."""

    type: Literal["endpoint"]
    base_url: Annotated[str, AfterValidator(endpoint_url)]
    """URL up to `/chat/completions`, e.g. `https://api.openai.com/v1`. Part of identity, because another server may serve another model."""
    model: str = Field(min_length=1)
    """The server's model name, dated if available. The model name in the server's responses is recorded."""
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Request field for the maximum answer length; OpenAI's reasoning models require `max_completion_tokens`."""
    omit_defaults: bool = added(False)
    """Omits `temperature` and `top_p` where they are 1, for models that reject them, such as OpenAI's reasoning models (`top_p`) and some
    Claude models (both together). The server's defaults then apply; vLLM takes them from the model's `generation_config.json`. Greedy
    requests never have `top_p`."""


Speaker = Annotated[ByPolicy | ByEndpoint, Field(discriminator="type")]


class ServedPolicy(Frozen):
    """A policy of the recipe, at an input of the stage, in a vLLM engine of its own while the stage works, with the stage's `dtype`. The
    engine has GPUs of its own, as many as `tensor_parallel`, which `slots` must count.

    Which replies are computed together depends on time, so that another run has other bits.
    """

    type: Literal["policy"]


Served = Annotated[ServedPolicy | ByEndpoint, Field(discriminator="type")]


def served_plan(by: Served, port: str, dtype: Dtype, answer: int) -> tuple[SamplingPlan, ...]:
    """How the policy at a port is queried while a stage works; empty for a server."""
    return (SamplingPlan(port, dtype, MAX_RUNNING, answer, chunk=1),) if isinstance(by, ServedPolicy) else ()


def unserved_problem(plans: Iterable[SamplingPlan], arrived: Arrived, *ports: str) -> str | None:
    """Error message if a policy arrives at one of these ports and nothing queries it, else None."""
    for port in ports:
        if arrived.get(port) and port not in {plan.port for plan in plans}:
            return f"the input {port} is set, but nothing queries it: set `by: {{type: policy}}` where the {port} is, or remove the input"
    return None


def shrink_asking(cut: Cut, port: str, field: str = "by") -> None:
    """Query the rehearsal's own endpoint instead of the recipe's: a tiny model cannot follow an output format."""
    if cut.get(f"{field}.type") == "endpoint":
        cut.set(f"{field}.base_url", cut.stand_ins.judge_url, "judges")
        return
    cut.leave_out(port)
    cut.set(field, {"type": "endpoint", "base_url": cut.stand_ins.judge_url, "model": "made"}, "judges")


def asking_needs(port: str) -> Callable[[Any], frozenset[str]]:
    """A kind's `needs`: a policy that is asked arrives at this port."""
    return lambda config: frozenset({port} if config.by.type == "policy" else ())


def asking_problem(port: str) -> Callable[[Any, Arrived], str | None]:
    """A kind's `problem`: a policy at this port that is not asked."""

    def problem(config: Any, arrived: Arrived) -> str | None:
        if arrived.get(port) and config.by.type != "policy":
            return f"{port} is {', '.join(arrived[port])}, but `by` is an endpoint: set `by: {{type: policy}}`, or remove the input"
        return None

    return problem


def endpoints(config: Frozen) -> Iterator[ByEndpoint]:
    """The servers that a config, or any part of it, names."""
    if isinstance(config, ByEndpoint):
        yield config
    for part in vars(config).values():
        for one in part if isinstance(part, tuple) else (part,):
            if isinstance(one, Frozen):
                yield from endpoints(one)


def asks_endpoint(config: Frozen) -> bool:
    """Whether a config, or any part of it, names a server."""
    return next(endpoints(config), None) is not None


def speaker_sampling_plan(by: Speaker, port: str, answer: int, field: str = "by") -> SamplingPlan | None:
    """How the policy at a port is queried; None for a server, which needs no engine here. `field` of the config has the speaker."""
    if not isinstance(by, ByPolicy):
        return None
    return SamplingPlan(port, by.dtype, by.chunk_size, answer, chunk_field=f"{field}.chunk_size")
