"""How much work a stage has, and with which models: rows, tokens and steps, from its inputs and its config.

Each kind declares this next to its ports (`stages/NAME/kind.py`). `work` is its amount; for stages that have not run yet, `rows` is an
upper bound of what they will write, and `row_tokens` the length of one. `training_plan`, `scoring_plan` and `sampling_plan` describe what
it does with models. A plan counts what has run, and uses the hooks for the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal, Protocol

from pedigree.configs.base.frozen import Dtype, HeadPrecision

How = Literal["counted", "estimated", "at most", "at least"]
WEAKEST: tuple[How, ...] = ("at least", "at most", "estimated", "counted")
"""How a number is known, weakest first: a product is known as its weakest factor is."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM has attention on a CPU."""
MAX_RUNNING = 256
"""Requests that vLLM runs at the same time."""
PROMPT_TOKENS = 256
"""Assumed tokens of a prompt if its dataset does not exist yet and no config bounds them."""
SHARE_OF_A_BOUND = 0.5
"""Mean over upper bound where only the bound is known (an assumption): answers end before their limit, ties make no pairs."""
TURN = 5.0
"""Tokens that a template adds to a message."""
CHARACTERS = 4.0
"""Characters per token, for English text without digits and a large vocabulary."""


@dataclass(frozen=True)
class Amount:
    """A number, and how it is known: counted by a stage that has run, estimated from its rows, or a bound of configs."""

    value: float
    how: How

    def times(self, factor: "float | Amount") -> "Amount":
        other = factor if isinstance(factor, Amount) else Amount(factor, "counted")
        weaker = other if WEAKEST.index(other.how) < WEAKEST.index(self.how) else self
        return Amount(self.value * other.value, weaker.how)

    def at_most(self, bound: float) -> "Amount":
        return self if self.value <= bound else Amount(bound, self.how)


def unservable(heads: int, kv_heads: int, head_dim: int, ffn: int, device: str, ranks: int) -> str | None:
    """Why vLLM cannot serve a model of this shape on so many ranks, or None."""
    for count, part in ((heads, "attention heads"), (ffn, "columns of its MLP")):
        if count % ranks:
            return f"tensor_parallel {ranks} does not divide the model's {count} {part}: use one of its divisors"
    if kv_heads % ranks and ranks % kv_heads:
        return f"tensor_parallel {ranks} is neither a divisor nor a multiple of the model's {kv_heads} key-value heads: choose one"
    if device == "cpu" and head_dim not in CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, CPU_HEAD_DIMS))
        return f"the model's head size is {head_dim}, but vLLM on a CPU serves {sizes}: use a model with one of these, or a GPU"
    return None


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters, which are trained in place of all weights."""

    rank: int = 16
    matrices: int = 7
    """Number of the seven linear layers of a block that have adapters."""


@dataclass(frozen=True)
class TrainingPlan:
    """How a stage trains the model at its port `policy`."""

    dtype: Dtype
    """Compute dtype, which is also that of the model that it writes."""
    batch: int
    """Rows of an optimizer step, over all ranks."""
    batch_of: str
    """Config field that sets `batch`, or a product of fields."""
    unit: str
    """Name of those rows."""
    longest: int
    """Upper bound of a row's tokens, with all its answers. A row is never split over passes."""
    epochs: int = 1
    max_steps: int | None = None
    """Upper bound of the steps of all epochs."""
    share: float = 1
    """Share of the rows that is trained on; the others are held out."""
    examples: int = 1
    """Maximum number of examples that a row of the data becomes."""
    made_of: str = ""
    """How the rows of a step are generated, if they are not read."""
    steps: int | None = None
    """Number of steps, if the config specifies it."""
    adapters: Adapters | None = None
    """None to train all weights."""
    adaptable: bool = False
    """Whether the config has a field `lora`."""
    scalar_head: bool = False
    """Whether a head with one output replaces the vocabulary head."""
    head: HeadPrecision = "model"
    """Precision of the products of the vocabulary head."""
    reference: bool = False
    """Whether a frozen model is held next to the policy: the one at the port `reference`, else the initial policy."""
    without_reference: str = ""
    """Instruction for training without it; empty if that is impossible."""
    teacher: bool = False
    """Whether another frozen model is held: the one at the port `teacher`."""
    value: bool = False
    """Whether a value model is trained too: from the model at the port `value`, else from the policy."""
    updates: int = 1
    """How often a token is trained on per epoch or step."""
    looks: int = 0
    """Further forward passes of the policy over each token."""

    def steps_for(self, rows: float) -> int:
        """Optimizer steps for this many rows of the data."""
        steps = ceil(rows * self.share * self.examples / self.batch) * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True)
class ScoringPlan:
    """How a stage passes given texts through a frozen model in torch."""

    port: str
    """Port of the models."""
    dtype: Dtype
    longest: int | None = None
    """Upper bound of a text's tokens, where the config has one."""
    scalar_head: bool = False
    """Whether the model has a head with one output in place of the vocabulary head."""
    head: HeadPrecision = "model"
    """Precision of the products of the vocabulary head."""


@dataclass(frozen=True)
class SamplingPlan:
    """How a stage submits its requests to an engine."""

    port: str
    """Port of the models that the engine loads."""
    dtype: Dtype
    """Dtype of the engine's weights and cache."""
    together: int
    """Number of requests that are submitted together."""
    answer: int
    """Tokens of the longest answer; 0 where given texts are only scored."""
    samples: int = 1
    """Answers to each prompt, whose beginning they share."""
    chunk: int | None = None
    """Requests whose KV cache must fit at the same time, where these are fewer than `together`: 1 if requests queue."""
    chunk_field: str = ""
    """Config field that sets `together`, if there is one."""
    queued_by: str = ""
    """Setting of the recipe under which requests queue, if there is one."""
    max_prompt: int | None = None
    """Upper bound of a prompt's tokens, where the config has one."""
    beside: bool = False
    """Whether the stage trains at the same time: on GPUs, its engines have their own after those of its ranks."""


@dataclass(frozen=True)
class Amounts:
    """What a stage has to do; None where it is unknown."""

    rows: Amount | None = None
    """Rows that it reads: conversations, pairs, prompts."""
    document: Amount | None = None
    """Tokens of a row, with its prompt and all its answers."""
    steps: Amount | None = None
    """Optimizer steps; of `rlvr`, batches of rollouts."""
    tokens: Amount | None = None
    """Tokens that pass through the model, over the whole stage."""
    prompt: Amount | None = None
    """Tokens of one prompt, where answers are generated."""
    requests: Amount | None = None
    """Answers to generate over the whole stage."""
    plan: SamplingPlan | None = None
    """How the requests are submitted."""
    answer: float = 0.0
    """Maximum tokens of an answer, averaged over all requests."""

    def in_turns(self, turns: int, answer: float) -> "Amounts":
        """With a request for each of up to `turns` answers of at most `answer` tokens, in place of one for the whole conversation: a later
        prompt has all before it, on average half of what may be added."""
        if self.requests is None or self.prompt is None:
            return self
        prompt = Amount(self.prompt.value + (self.answer - answer) / 2, "at most")
        return replace(self, requests=Amount(self.requests.times(turns).value, "at most"), prompt=prompt, answer=answer)


class PlannedStage(Protocol):
    """A stage of a plan, as the hooks of kinds see it."""

    @property
    def config(self) -> Any: ...

    @property
    def frozen(self) -> bool:
        """Whether its kind is `frozen`."""
        ...

    @property
    def inputs(self) -> Mapping[str, Mapping[str, "PlannedStage"]]:
        """Port → label → stage."""
        ...

    @property
    def readers(self) -> "Sequence[PlannedStage]":
        """The stages that it is an input of."""
        ...

    @property
    def rows(self) -> Amount | None:
        """Rows that it writes: from its record, else by its kind's hook; None where they are unknown."""
        ...

    @property
    def row_tokens(self) -> float | None:
        """Tokens of a row that it writes: from its rows, else by its kind's hook; None where they are unknown."""
        ...

    def packaged_texts(self, asset: str) -> Sequence[str]:
        """The text of each row of a packaged file; none where it is not on this machine."""
        ...

    def rows_in(self, path: str) -> int | None:
        """Rows in a file or folder of this machine, at most; None where they are unknown."""
        ...

    def place(self, path: str) -> Path:
        """Where a file of the project is on this machine, if it is there."""
        ...

    def problem_of(self, source: Any) -> str | None:
        """Why its config cannot use a source or a program, as far as that is on this machine."""
        ...


def only(stage: PlannedStage, *ports: str) -> PlannedStage:
    """The stage at the first of these ports that has one."""
    return next(above for port in ports for above in stage.inputs.get(port, {}).values())


def rows_at(stage: PlannedStage, port: str) -> Amount | None:
    """A bound for a stage that passes on some of the rows at a port."""
    rows = only(stage, port).rows
    return Amount(rows.value, "at most") if rows else None


def fewer_at(stage: PlannedStage, port: str, needed: float) -> str:
    """The number of rows at a port, as a text, if there are certainly fewer than `needed`; else empty."""
    rows = only(stage, port).rows
    if rows is None or rows.how == "estimated" or rows.value >= needed:
        return ""
    return f"{'at most ' if rows.how == 'at most' else ''}{rows.value:.0f}"


def tokens_at(port: str) -> Callable[[PlannedStage], float | None]:
    """A `row_tokens` hook for kinds whose rows are as long as those at a port."""
    return lambda stage: only(stage, port).row_tokens


def at_ports(stage: PlannedStage, ports: Sequence[str], longest: int | None = None) -> tuple[Amount | None, Amount | None]:
    """(rows, tokens of one) of everything at some ports; one row has at most `longest` tokens."""
    bound = Amount(longest, "at most") if longest else None
    rows, tokens, known = Amount(0, "counted"), 0.0, True
    for above in (above for port in ports for above in stage.inputs.get(port, {}).values()):
        count, mean = above.rows, above.row_tokens
        if count is None:
            return None, bound
        known = known and mean is not None
        rows = Amount(rows.value + count.value, rows.times(count).how)
        tokens += count.value * (mean or 0)
    if not known or not rows.value:
        return rows, bound
    document = Amount(tokens / rows.value, "estimated")
    return rows, document.at_most(longest) if longest else document


def generation(requests: Amount | None, prompt: Amount | None, plan: SamplingPlan) -> Amounts:
    """The work of a stage that generates one answer to each request."""
    prompt = prompt or Amount(PROMPT_TOKENS, "estimated")
    tokens = requests.times(Amount(prompt.value + plan.answer, "at most")) if requests else None
    return Amounts(rows=requests, prompt=prompt, requests=requests, plan=plan, tokens=tokens, answer=plan.answer)


def rows_written(stage: PlannedStage) -> Amounts:
    """The work of a stage without a model: the rows that it writes."""
    return Amounts(rows=stage.rows)
