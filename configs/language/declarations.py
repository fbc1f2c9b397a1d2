"""Declaration of every kind of stage: version, config class, input and output types. Nothing here imports torch.

The implementation of a kind is `stages/KIND.py`, which only jobs import.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from configs.base.frozen import Arrived, Frozen
from configs.judging import answers, constraining, keeping, pairing, rephrasing, synthesis
from configs.methods import merging, training
from configs.rows import datasets, decontamination, preparing

ArtifactType = Literal[
    "policy", "reward_model", "conversation", "prompt", "preference", "item", "completion", "judgment", "scores", "logprobs", "report"
]
DATASETS = frozenset({"conversation", "prompt", "preference", "item"})
COMPARING = ("decontaminate", "find_rephrased")
"""Kinds of stages that drop rows overlapping with benchmark items and list them in `evidence/manifest.jsonl`."""


@dataclass(frozen=True)
class Port:
    """One named input of a stage."""

    types: frozenset[str]
    many: bool = False
    """Accepts one or more artifacts, each with a label (by default the name of its stage)."""
    optional: bool = False
    measures: bool = False
    """The artifact only measures the output; none of its content goes into it."""


def port(*types: ArtifactType, many: bool = False, optional: bool = False, measures: bool = False) -> Port:
    return Port(frozenset(types), many, optional, measures)


@dataclass(frozen=True)
class Declaration:
    """A kind of stage. Increment `version` when the meaning of its output changes."""

    kind: str
    version: int
    config: type[Frozen]
    inputs: Mapping[str, Port]
    output: Callable[[Any, Mapping[str, list[str]]], str]
    """Artifact type, from the config and the types at each port."""
    engine: Literal["none", "torch", "deepspeed", "vllm", "deepspeed+vllm"] = "none"
    """Engine that its job loads; `deepspeed` kinds can run on several ranks."""
    trains_on: frozenset[str] = field(default_factory=frozenset)
    """Ports whose rows contribute to gradients; the decontamination gate guards them."""
    unchecked: bool = False
    """Its rows contain model-generated text, which may reproduce a benchmark whatever the model was shown: earlier decontamination does not
    carry over to them."""
    needs: Callable[[Any], frozenset[str]] = lambda config: frozenset()
    """Optional inputs that a config requires."""
    problem: Callable[[Any, Arrived], str | None] = lambda config, arrived: None
    """Error message if a config and its inputs are incompatible, else None."""

    @property
    def trains(self) -> bool:
        """Whether its output is a model trained from the one at port `policy`."""
        return bool(self.trains_on)


def gives(artifact_type: ArtifactType) -> Callable[[Any, Mapping[str, list[str]]], str]:
    return lambda config, inputs: artifact_type


SCORERS: Mapping[str, Port] = {
    "reward_models": port("reward_model", many=True, optional=True),
    "judge": port("policy", optional=True),
}
"""Ports of the models that score answers."""

DECLARATIONS: dict[str, Declaration] = {
    declaration.kind: declaration
    for declaration in (
        Declaration(
            kind="source_model",
            version=3,
            config=datasets.SourceModel,
            inputs={"corpus": port("conversation", many=True, optional=True)},
            output=gives("policy"),
            engine="torch",
            needs=lambda config: frozenset({"corpus"} if config.source.type == "random_llama" else ()),
        ),
        Declaration(
            kind="prepare_data",
            version=8,
            config=datasets.PrepareData,
            inputs={
                "leak_from": port("item", many=True, optional=True),
                datasets.ROWS: port("conversation", "prompt", "preference", many=True, optional=True),
                datasets.TOKENIZER: port("policy", optional=True, measures=True),
            },
            output=lambda config, inputs: config.record,
            needs=preparing.needs_of,
            problem=preparing.inputs_problem,
        ),
        Declaration(
            kind="decontaminate",
            version=6,
            config=decontamination.Decontaminate,
            inputs={"data": port("conversation", "prompt", "preference"), "benchmarks": port("item", many=True)},
            output=lambda config, inputs: inputs["data"][0],
        ),
        Declaration(
            kind="find_rephrased",
            version=1,
            config=rephrasing.FindRephrased,
            inputs={
                "data": port("conversation", "prompt", "preference"),
                "benchmarks": port("item", many=True),
                "judge": port("policy", optional=True),
            },
            output=lambda config, inputs: inputs["data"][0],
            engine="vllm",
            needs=rephrasing.rephrased_needs,
            problem=rephrasing.rephrased_problem,
        ),
        Declaration(
            kind="sft",
            version=3,
            config=training.Sft,
            inputs={"policy": port("policy"), "data": port("conversation", many=True)},
            output=gives("policy"),
            engine="deepspeed",
            trains_on=frozenset({"data"}),
        ),
        Declaration(
            kind="sample",
            version=3,
            config=answers.Sample,
            inputs={"policies": port("policy", many=True), "prompts": port("prompt")},
            output=gives("completion"),
            engine="vllm",
            problem=answers.sample_problem,
        ),
        Declaration(
            kind="judge",
            version=7,
            config=answers.Judge,
            inputs={"completions": port("completion"), **SCORERS},
            output=gives("judgment"),
            engine="torch",
            needs=answers.scorers_need,
            problem=answers.scorers_problem,
        ),
        Declaration(
            kind="pair",
            version=6,
            config=pairing.Pair,
            inputs={
                "judgments": port("judgment", optional=True),
                "completions": port("completion", optional=True),
                "relaxed": port("completion", optional=True),
            },
            output=gives("preference"),
            needs=pairing.pair_needs,
            problem=pairing.pair_problem,
        ),
        Declaration(
            kind="best_answers",
            version=1,
            config=keeping.BestAnswers,
            inputs={"judgments": port("judgment")},
            output=gives("conversation"),
            problem=keeping.keeping_problem,
        ),
        Declaration(
            kind="select_prompts",
            version=2,
            config=keeping.SelectPrompts,
            inputs={"prompts": port("prompt"), "judgments": port("judgment")},
            output=gives("prompt"),
            problem=keeping.keeping_problem,
        ),
        Declaration(
            kind="select_rows",
            version=1,
            config=keeping.SelectRows,
            inputs={"data": port("conversation", "preference"), **SCORERS},
            output=lambda config, inputs: inputs["data"][0],
            engine="torch",
            needs=answers.scorers_need,
            problem=answers.scorers_problem,
        ),
        Declaration(
            kind="constrain",
            version=2,
            config=constraining.Constrain,
            inputs={"prompts": port("prompt")},
            output=gives("prompt"),
        ),
        Declaration(
            kind="synthesize",
            version=1,
            config=synthesis.Synthesize,
            inputs={"prompts": port("prompt"), "writer": port("policy", optional=True)},
            output=gives("prompt"),
            engine="vllm",
            unchecked=True,
            needs=synthesis.synthesize_needs,
            problem=synthesis.synthesize_problem,
        ),
        Declaration(
            kind="overoptimization",
            version=1,
            config=answers.Overoptimization,
            inputs={"judgments": port("judgment"), "gold": port("judgment", optional=True)},
            output=gives("report"),
            problem=answers.overoptimization_problem,
        ),
        Declaration(
            kind="reward_model",
            version=3,
            config=training.RewardModel,
            inputs={"policy": port("policy"), "preferences": port("preference", many=True)},
            output=gives("reward_model"),
            engine="deepspeed",
            trains_on=frozenset({"preferences"}),
            problem=pairing.reward_model_problem,
        ),
        Declaration(
            kind="reference_logprobs",
            version=1,
            config=training.ReferenceLogprobs,
            inputs={"policy": port("policy"), "preferences": port("preference", many=True)},
            output=gives("logprobs"),
            engine="torch",
        ),
        Declaration(
            kind="preference_train",
            version=3,
            config=training.PreferenceTrain,
            inputs={
                "policy": port("policy"),
                "preferences": port("preference", many=True),
                "reference": port("policy", "logprobs", optional=True),
            },
            output=gives("policy"),
            engine="deepspeed",
            trains_on=frozenset({"preferences"}),
            problem=pairing.preference_problem,
        ),
        Declaration(
            kind="rlvr",
            version=3,
            config=training.Rlvr,
            inputs={
                "policy": port("policy"),
                "prompts": port("prompt"),
                "reference": port("policy", optional=True),
                "value": port("reward_model", optional=True),
            },
            output=gives("policy"),
            engine="deepspeed+vllm",
            trains_on=frozenset({"prompts"}),
            problem=training.rlvr_problem,
        ),
        Declaration(
            kind="merge",
            version=1,
            config=merging.Merge,
            inputs={"policies": port("policy", many=True)},
            output=gives("policy"),
            engine="torch",
            problem=merging.merge_problem,
        ),
        Declaration(
            kind="evaluate",
            version=3,
            config=answers.Evaluate,
            inputs={"policies": port("policy", many=True), "suites": port("item", many=True)},
            output=gives("scores"),
            engine="vllm",
            problem=answers.evaluate_problem,
        ),
        Declaration(
            kind="select",
            version=1,
            config=answers.Select,
            inputs={"candidates": port("policy", many=True), "scores": port("scores")},
            output=gives("policy"),
        ),
    )
}


def measures(kind: str, port: str) -> bool:
    """Whether the input at this port only measures the output; False for unknown kinds."""
    declaration = DECLARATIONS.get(kind)
    return declaration is not None and port in declaration.inputs and declaration.inputs[port].measures
