"""Merge several policies into one by arithmetic on their weights, without training.

payload/                the first policy's folder (file layout, dtype, tokenizer, template) with the merged weights

The metrics contain the distance of the result to each input, ‖merged - input‖₂ / ‖input‖₂.
Not implemented: methods that need a common base or per-layer settings (task arithmetic, TIES, DARE).
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from pedigree.configs.methods.merging import LinearMerge, Merge, SlerpMerge
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job
from pedigree.stages.merge.distance import relative_l2
from pedigree.stages.merge.weights import Weights, difference, merge_folders, slerp, weighted_mean

IRRELEVANT_KEYS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of `config.json` that do not affect the model's function (`architectures` only names the class that `model_type` selects)."""


def run(config: Merge, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Merge tensor by tensor.

    Raises:
        StageError: the policies differ in architecture, shapes, vocabulary or chat template.
    """
    policies = inputs["policies"]
    first, *others = policies
    weights = {label: Weights(policy.payload) for label, policy in policies.items()}
    for label in others:
        problem = unlike(policies[first], policies[label]) or difference(weights[first], weights[label])
        if problem:
            raise StageError(f"{first} and {label} cannot be merged: {problem}; merge policies with a common base model")
    payload = job.out / "payload"
    with job.busy("copying the model"):
        shutil.copytree(policies[first].payload, payload, ignore=shutil.ignore_patterns("*.safetensors"))
    count = len(weights[first].entries)
    merge_folders(list(weights.values()), combination(config, list(policies)), payload, lambda done: job.progress(done, count))
    with job.busy("measuring distances"):
        distances = {label: relative_l2(policy.payload, payload) for label, policy in policies.items()}
    return {"policies": len(policies), "tensors": count, "distances": distances}


def combination(config: Merge, labels: list[str]) -> Callable[[Iterable[Tensor]], Tensor]:
    """The merge method as a function of the inputs' tensors of the same name."""
    match config.method:
        case SlerpMerge(t=t):
            return lambda tensors: slerp(*tensors, t=t)
        case LinearMerge(weights=weights):
            given = [weights[label] if weights else 1.0 for label in labels]
            return lambda tensors: weighted_mean(tensors, given)


def unlike(first: Artifact, other: Artifact) -> str | None:
    """Why two policies differ in architecture, vocabulary or template, or None."""
    ours, theirs = (read(policy.payload / "config.json") for policy in (first, other))
    for key in sorted((ours.keys() | theirs.keys()) - IRRELEVANT_KEYS):
        if ours.get(key) != theirs.get(key):
            return f"{key} of config.json is {ours.get(key)!r} in one and {theirs.get(key)!r} in the other"
    if vocabulary(first.payload) != vocabulary(other.payload):
        return "their tokenizers differ, so the same embedding row stands for different tokens"
    if Chat(first.payload).template != Chat(other.payload).template:
        return "their chat templates differ"
    return None


def vocabulary(folder: Path) -> dict[str, Any]:
    """A tokenizer without its batching settings."""
    return {key: value for key, value in read(folder / "tokenizer.json").items() if key not in ("padding", "truncation")}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
