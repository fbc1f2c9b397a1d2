"""What the training benchmarks train: models and rows from packages, the same documents in the same order for both sides.

    python -m benchmarks.workloads FOLDER

reads FOLDER/workload.json and makes FOLDER/policy and FOLDER/data (artifacts, for our stages) and FOLDER/units.json (the documents of
each optimizer step, for the peer, made by our stages' own tokenisation: so both train on the same ids).
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pedigree.configs.base.frozen import Dtype
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.pipelines.jobs.job_environment import device_settings

Task = Literal["sft", "reward_model", "preference_train", "rlvr"]
SEED, LEARNING_RATE, THREADS = 0, 1e-5, 2


@dataclass(frozen=True)
class Workload:
    """One reading: a task on a model."""

    task: Task
    model: str
    """One of `MODELS`."""
    max_length: int
    global_batch: int
    """Rows, pairs or prompts per optimizer step, on both sides."""
    steps: int
    """Optimizer steps, the first of which warm up."""
    peer_batch: int
    """Rows, pairs or answers in one forward pass of the peer, the rest of the batch is accumulated."""
    title: str
    goal: float
    """The intended ratio."""
    _: KW_ONLY
    warmup: int = 1
    group: int = 1
    """Answers per prompt."""
    dtype: Dtype = "bf16"
    """Dtype of ours; the peer's is bf16."""
    numerics: dict[str, Any] = field(default_factory=dict)
    """Our numerics, where they differ from the defaults of a CPU."""
    tolerance: float = 0.02
    """Maximum difference of the two first losses, relative to the peer's: bf16 rounds at 2⁻⁸."""

    @property
    def setting(self) -> str:
        rows = {"sft": "rows", "rlvr": "answers"}.get(self.task, "pairs")
        step = f"{self.dtype}, {self.global_batch * self.group} {rows} a step, at most {self.max_length} tokens, {THREADS} threads"
        return f"{step}; ours: {self.our_numerics().micro_batch_tokens} tokens a pass; peer: {self.peer_batch} {rows} a pass"

    def our_numerics(self) -> Numerics:
        return Numerics(device="cpu", threads=THREADS, **self.numerics)

    def write(self, folder: Path) -> None:
        (folder / "workload.json").write_text(json.dumps(asdict(self)))


def read(folder: Path) -> Workload:
    """The workload of a folder."""
    return Workload(**json.loads((folder / "workload.json").read_text()))


PEERS: dict[str, dict[str, str]] = {
    "tuned": device_settings(Numerics(device="cpu", threads=THREADS)),
    "documented": {"OMP_NUM_THREADS": str(THREADS)},
}
"""Environment of the peer's process: settings of memory and idle threads as in our jobs, or a user's defaults."""

TWO_PAIRS = {"micro_batch_tokens": 2048}
"""Room for two long pairs. As our pass was chosen for speed, so was the peer's: of 1, 2 and 4 pairs, and of 2, 4 and 8."""

WORKLOADS: dict[str, Workload] = {
    "sft": Workload("sft", "smollm2-135m", 256, 16, 5, 8, "SFT, SmolLM2-135M", 2.0),
    "sft-20m": Workload("sft", "llama-20m", 512, 32, 6, 4, "SFT, 20M Llama", 2.0),
    "reward_model": Workload("reward_model", "smollm2-135m", 384, 4, 5, 2, "Reward model, SmolLM2-135M", 2.0, numerics=TWO_PAIRS),
    "reward_model-20m": Workload("reward_model", "llama-20m", 512, 8, 6, 2, "Reward model, 20M Llama", 2.0, numerics=TWO_PAIRS),
    "dpo": Workload("preference_train", "smollm2-135m", 384, 4, 4, 2, "DPO, SmolLM2-135M", 4.0),
    "dpo-20m": Workload("preference_train", "llama-20m", 512, 8, 5, 4, "DPO, 20M Llama", 4.0),
    "grpo": Workload("rlvr", "smollm2-135m", 256, 4, 4, 4, "GRPO update, SmolLM2-135M", 4.0, group=4),
    "grpo-20m": Workload("rlvr", "llama-20m", 512, 8, 4, 8, "GRPO update, 20M Llama", 4.0, group=8),
}

MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"type": "packaged", "asset": "smollm2-135m-instruct"},
    "llama-20m": {
        "type": "random_llama",
        "layers": 8,
        "hidden": 384,
        "heads": 6,
        "kv_heads": 6,
        "ffn": 1024,
        "vocabulary": 8192,
        "context": 1024,
    },
    "llama-tiny": {
        "type": "random_llama",
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 64,
        "vocabulary": 512,
        "context": 1024,
    },
}
"""Fields of `source_model`; the tiny one is for tests."""


def packaged(asset: str, record: Any) -> list[dict[str, Any]]:
    """The rows of packaged data, with their numbers as ids."""
    from pedigree.configs.rows.row_sources import Packaged
    from pedigree.data.sources import sources

    source = sources.opened(Packaged(type="packaged", asset=asset), record, None, sources.Outside())
    return [{"id": str(number), **row} for number, row in enumerate(row for block in source.blocks for row in source.parse(block).rows)]


def prepare(workload: Workload, folder: Path) -> None:
    """Write policy, data and units of a workload below `folder`."""
    from pedigree.data.artifacts.artifacts import open_artifact
    from pedigree.data.chat.chat import Chat
    from pedigree.data.chat.documents import Conversations, Pairs
    from pedigree.data.records import records
    from pedigree.stages.core.batches import step_rows
    from pedigree.stages.job.job import Job
    from pedigree.stages.training.token_cache import units_of
    from pedigree.stages.training.training_rows import fitting, pairs

    conversations = packaged("alpaca-en-demo", "conversation")
    make_policy(workload.model, conversations, folder)
    policy = open_artifact(folder / "policy")
    chat = Chat(policy.payload)
    in_pairs = workload.task in ("reward_model", "preference_train")
    rows = packaged("dpo-en-demo", "preference") if in_pairs else conversations
    scratch = Job(folder / "scratch", "bench/rows", "k", Numerics(), Placement(), {})
    scratch.folder.mkdir()
    taken, documents = (pairs(rows, "adjacent"), Pairs("adjacent")) if in_pairs else (rows, Conversations("assistant"))
    kept, units = fitting(taken, units_of(taken, documents, chat, scratch, policy, ()), workload.max_length, scratch)
    count = workload.steps * workload.global_batch
    chosen = drawn(len(units), count, workload.global_batch, None if in_pairs else [len(unit[0]) for unit in units])
    by_id = {row["id"]: row for row in rows}
    placed: list[Any] = [None] * count
    for place, number in zip(step_rows(0, count, count, SEED), chosen, strict=True):
        placed[place] = by_id[kept[number]["id"]]
    record = "preference" if in_pairs else "conversation"
    records.save(folder / "data", record, placed)
    seal(folder / "data", record)
    if workload.task == "rlvr":
        trained = [answered(units, chosen, place, workload) for place in range(count)]
    else:
        trained = [units[row] for row in chosen]
    told = [[{"ids": doc.ids.tolist(), "trained": doc.trained.tolist()} for doc in unit] for unit in trained]
    (folder / "units.json").write_text(json.dumps(told))


def answered(units: Sequence[Any], chosen: list[int], place: int, workload: Workload) -> list[Any]:
    """A row's prompt with `group` answers: its own and those of the next rows, truncated to fit."""
    from pedigree.stages.core.batches import document

    (own,) = units[chosen[place]]
    prompt = own.ids[: own.prompt_length].tolist()
    answers = [units[chosen[(place + further) % len(chosen)]][0] for further in range(workload.group)]
    said = [answer.ids[answer.prompt_length :].tolist() for answer in answers]
    return [document(prompt, ids[: workload.max_length - len(prompt)]) for ids in said]


def rewards(number: int, group: int) -> list[float]:
    """Scores of the answers to prompt `number`: half of them are right."""
    return [float((number + place) % 2) for place in range(group)]


def drawn(total: int, count: int, batch: int, lengths: list[int] | None) -> list[int]:
    """`count` rows in training order. With lengths: whole batches out of the order in which transformers' own sampler
    groups all rows by length, at even distances, so that their lengths are those of the data and the peer pads as little as there."""
    if count > total:
        raise SystemExit(f"the benchmark takes {count} rows and {total} are short enough: lower steps or global_batch, or raise max_length")
    if lengths is None:
        return random.Random(f"bench/{SEED}").sample(range(total), count)
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    order = get_length_grouped_indices(lengths, batch, generator=torch.Generator().manual_seed(SEED))
    batches, wanted = total // batch, count // batch
    taken = [int((number + 0.5) * batches / wanted) for number in range(wanted)]
    random.Random(SEED).shuffle(taken)
    return [row for number in taken for row in order[number * batch : (number + 1) * batch]]


def make_policy(model: str, conversations: list[Any], folder: Path) -> None:
    """A policy, as `source_model` makes it."""
    from pedigree.configs.rows.source_models import SourceModel
    from pedigree.data.artifacts.artifacts import open_artifact
    from pedigree.data.records import records
    from pedigree.stages.job.job import Job
    from pedigree.stages.source_model import run as source_model

    records.save(folder / "corpus", "conversation", conversations)
    seal(folder / "corpus", "conversation")
    config = SourceModel.model_validate({"source": MODELS[model]})
    job = Job(folder / "policy-job", "bench/policy", "k", Numerics(), Placement(), {})
    job.folder.mkdir(exist_ok=True)
    source_model.run(config, {"corpus": {"corpus": open_artifact(folder / "corpus")}}, job)
    job.out.rename(folder / "policy")
    seal(folder / "policy", "policy")


def seal(folder: Path, artifact_type: str) -> None:
    """Turn a folder with a payload into an artifact."""
    from pedigree.data.artifacts.artifacts import Record, content_hash, scan, write_json

    files = scan(folder / "payload")
    content = content_hash(files)  # no recipe has made it: what it is stands for the key, too
    made = {"kind": "benchmark", "version": 1, "type": artifact_type, "config": {}, "inputs": (), "metrics": {}}
    record = Record(key=content, content=content, files=files, **made)
    write_json(folder / "record.json", record.model_dump(mode="json"))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    prepare(read(place), place)
