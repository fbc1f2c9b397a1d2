"""A kind of stage: the one declaration that recipes, plans, rehearsals and reports read.

`stages/NAME/kind.py` declares it as `KIND` and loads nothing heavy; `stages/NAME/run.py` has its `run(config, inputs, job)`, which jobs
alone import.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pedigree.configs.base.frozen import Arrived, Frozen
from pedigree.configs.base.shrink import Shrink, unchanged
from pedigree.configs.base.work import Amount, Amounts, PlannedStage, SamplingPlan, ScoringPlan, TrainingPlan, rows_written

ArtifactType = Literal[
    "policy", "reward_model", "conversation", "prompt", "preference", "item", "completion", "judgment", "scores", "logprobs", "report"
]
DATASETS = frozenset({"conversation", "prompt", "preference", "item"})
MODELS = frozenset({"policy", "reward_model"})
Family = Literal["source", "data", "sampling", "judging", "training", "measuring"]


@dataclass(frozen=True)
class Port:
    """One named input of a stage."""

    types: frozenset[str]
    many: bool = False
    """Takes one or more artifacts, each under a label (by default the name of its stage)."""
    optional: bool = False
    measures: bool = False
    """The artifact only measures the output; nothing of it becomes part of the output."""
    pooled: bool = False
    """Takes many artifacts, and their labels reach nothing in the output."""
    merged: bool = False
    """Its models become one, so that they must have the same shape."""

    @property
    def takes_labels(self) -> bool:
        """Whether the output can depend on the labels of its artifacts; one artifact alone needs no label."""
        return self.many and not self.pooled


def port(*types: ArtifactType, many: bool = False, pooled: bool = False, **others: bool) -> Port:
    return Port(frozenset(types), many or pooled, pooled=pooled, **others)


RENDERING = ("data/chat/chat.py", "data/chat/chat_template.py", "data/chat/documents.py", "data/chat/tools.py")
"""Code that turns messages into tokens, for `Kind.decided_by`."""
REWARDING = ("data/chat/reward_stats.py", "stages/sampling/rewards.py")
"""Code that scores answers by reward models."""
FUNCTIONS = tuple(f"stages/verifiers/{name}.py" for name in ("project_programs", "reward_programs", "sandboxed"))
"""Code that scores answers by functions of the project."""
CONVERSATIONS = (*FUNCTIONS, "stages/verifiers/environments.py", "stages/sampling/conversations.py", "stages/sampling/partners.py")
"""Code of conversations with an environment."""


@dataclass(frozen=True)
class Kind:
    """A kind of stage. Raise `version` when the meaning of its output changes."""

    name: str
    version: int
    config: type[Frozen]
    inputs: Mapping[str, Port]
    output: Callable[[Any, Mapping[str, list[str]]], str]
    """Type of the artifact, from the config and the types that arrived at each port."""
    engine: Literal["none", "torch", "deepspeed", "vllm", "deepspeed+vllm"] = "none"
    """Libraries that its job loads; `deepspeed` kinds may run on several ranks."""
    needs: Callable[[Any], frozenset[str]] = lambda config: frozenset()
    """Optional inputs that a config makes required."""
    problem: Callable[[Any, Arrived], str | None] = lambda config, arrived: None
    """Why a config and its inputs do not go together, or None."""
    preflight: Callable[[PlannedStage], Iterable[str]] = lambda stage: ()
    """Why a stage cannot succeed, with remedies, by what its inputs will hold and the files on this machine. Checked before any job."""
    warnings: Callable[[PlannedStage], Iterable[str]] = lambda stage: ()
    """What a plan warns of: what the stage can do but probably should not, and what is not known of it."""

    # lineage
    trains_on: frozenset[str] = frozenset()
    """Ports whose rows reach a gradient if the output is a model: the decontamination gate guards them."""
    frozen: bool = False
    """Its models are final or come from outside the recipe, so that unseen suites may measure them."""
    unchecked: bool = False
    """A model writes its rows, which may repeat a benchmark that was removed upstream: the decontamination gate starts over."""
    sources: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] | None = None
    """The sources outside the recipe in a config, by which cards list licenses and a run checks revisions; None for a kind that brings in
    nothing. As in the sources of Pedigree, `repo`, `path` or `name` is the title, `licence` and `generator` are statements, `type: hub`
    marks a repository of the Hub (with a `revision`), a dataset if it has a `split`, and `type: artifact` another stage."""
    subset_of: str | None = None
    """The port whose rows it passes on in their order, some of them left out."""
    ids: Literal["kept", "kept within kind", "any"] = "any"
    """Ids of rows of other stages where `evidence/parents.parquet` names no parents: `kept`; `kept within kind`, if a stage of the same
    kind and type made them; or `any`, after which `trace` is uncertain. A `subset_of` its input keeps them."""
    without: Callable[[Any, Collection[str]], Sequence[Mapping[str, Any]]] | None = None
    """The complete `filters` that a recipe states to leave out imported rows with these ids too, which `pedigree forget` prints; None for a
    kind that cannot leave out any."""
    decontaminates: bool = False
    """Its rows pass the decontamination gate for the items at its port `benchmarks`."""
    removes_overlaps: bool = False
    """Leaves out rows that overlap with benchmark items, and lists them in `evidence/manifest.jsonl`."""

    # code
    verified: Callable[[Any], frozenset[str]] = lambda config: frozenset()
    """Ports whose rows name the verifiers that score answers in this stage. A changed verifier makes the stage stale."""
    decided_by: Callable[[Any], Sequence[str]] = lambda config: ()
    """Files and folders of Pedigree (`data/filters`) whose code decides what it drops or how it scores. A change in them makes the stage
    stale. For an added kind of data, judging or measuring, its own files count."""

    # plans
    work: Callable[[PlannedStage], Amounts] = rows_written
    """Rows, tokens and steps of a whole stage."""
    rows: Callable[[PlannedStage], Amount | None] = lambda stage: None
    """Upper bound of the rows that it will write."""
    row_tokens: Callable[[PlannedStage], float | None] = lambda stage: None
    """Expected tokens of a row that it will write."""
    training_plan: Callable[[Any], TrainingPlan | None] = lambda config: None
    """How it trains a model, from the config; None where it trains none."""
    scoring_plan: Callable[[Any], ScoringPlan | None] = lambda config: None
    """How it passes texts through a frozen model in torch; None where it does not."""
    sampling_plan: Callable[[Any], SamplingPlan | None] = lambda config: None
    """How it submits requests to an engine; None where it uses no engine. `work` may know longer answers."""
    served: Callable[[Any], Sequence[SamplingPlan]] = lambda config: ()
    """Optional ports whose policies are queried while it works, each in a further engine: a judge, a simulated user. A config that names
    one requires the input."""

    # rehearsals
    shrink: Shrink = unchanged
    """Makes a config small enough for a rehearsal."""

    # reports
    family: Family = "data"
    """Its color in the graph of a report."""
    curve: str | None = None
    """The column of its `evidence/curve.csv` to plot against `step`, where it leaves a curve."""
    reports_drops: bool = False
    """Its metrics count the rows that it left out, by reason."""

    @property
    def trains(self) -> bool:
        """Whether its output is a model trained from the one at the port `policy`."""
        return bool(self.trains_on) and "policy" in self.inputs

    def required(self, config: Any) -> frozenset[str]:
        """Optional inputs that a config makes required."""
        return self.needs(config) | {plan.port for plan in self.served(config)}

    def opens_engines(self, config: Any) -> bool:
        """Whether a stage starts as many engines, or copies of a frozen model, as its placement specifies."""
        return self.sampling_plan(config) is not None or (not self.trains and self.scoring_plan(config) is not None)


def gives(artifact_type: ArtifactType) -> Callable[[Any, Mapping[str, list[str]]], str]:
    return lambda config, inputs: artifact_type
