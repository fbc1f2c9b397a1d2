"""Check a finished stage's output independently of its report: rows counted, every step logged, all weights finite, and trained weights
changed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pedigree.configs.base.kind import MODELS
from pedigree.data.artifacts.artifacts import Artifact, sha256_file
from pedigree.data.records import records
from pedigree.stages.job.job import Job, read_curve

if TYPE_CHECKING:  # loads torch, which stages without training do not need
    from pedigree.stages.job.updates import Update

TEMPLATE_FILE = "chat_template.jinja"
"""A model folder's chat template."""
EXPONENTS = {"F32": ("uint32", 0x7F800000), "F16": ("uint16", 0x7C00), "BF16": ("uint16", 0x7F80)}
"""safetensors dtype → (unsigned type of the same width, exponent bits). If all exponent bits are set, the value is NaN or infinity (IEEE
754)."""
PIECE_BYTES = 64 << 20


def unmet(artifact_type: str, metrics: dict[str, Any], job: Job) -> str | None:
    """Why the output is incomplete, or None."""
    payload = job.out / "payload"
    if not payload.is_dir() or not any(payload.iterdir()):
        return "wrote no payload"
    if artifact_type in MODELS:
        return _model_problem(payload) or _steps_problem(metrics, job)
    return _rows_problem(payload, metrics)


def templates_of(inputs: Mapping[str, Mapping[str, Artifact]], payload: Path) -> dict[str, str]:
    """sha256 of the chat template of every input model, by port and label, and of the output model, under `out`."""
    folders = {f"{port}/{label}": model.payload for port, given in inputs.items() for label, model in given.items()}
    files = {name: folder / TEMPLATE_FILE for name, folder in (folders | {"out": payload}).items()}
    return {name: sha256_file(file) for name, file in files.items() if file.is_file()}


def other_template(templates: Mapping[str, str]) -> str | None:
    """Why a trained model's template differs from the one it was trained with, or None."""
    start = next((sha256 for name, sha256 in templates.items() if name.startswith("policy/")), None)
    if templates.get("out") == start:
        return None
    return f"the output model has the chat template {templates.get('out')}, but the initial policy has {start}"


def not_trained(update: "Update", metrics: dict[str, Any]) -> str | None:
    """Why nothing was trained, or None.

    Args:
        update: difference between the trained and the initial model.
        metrics: the stage's metrics.
    """
    if metrics.get("trained_tokens") == 0:
        return "no token contributed to a gradient: check the dropped rows or groups in its evidence"
    if metrics.get("informative_groups") == 0:
        return "all groups have equal rewards: use prompts of another difficulty, more samples_per_prompt, or a higher temperature"
    if update.vanished:
        return (
            f"its {update.tensors} tensors differ from the initial ones by {update.norm:.3g} in total, less than the rounding error of one "
            f"weight in {update.dtype}: raise optimizer.learning_rate, train for more steps, or set dtype: fp32"
        )
    return None


def _rows_problem(payload: Path, metrics: dict[str, Any]) -> str | None:
    files = records.row_files(path.name for path in payload.iterdir())
    if not files:
        return "wrote no rows"
    rows = sum(records.count(payload / name) for name in files)
    if rows == 0:
        return f"wrote no rows to {files[0]}"
    reported = metrics.get("rows")
    return f"reports {reported} rows but wrote {rows}" if isinstance(reported, int) and reported != rows else None


def _steps_problem(metrics: dict[str, Any], job: Job) -> str | None:
    """Check that the curve has every step once, in order."""
    if "steps" not in metrics:
        return None
    curve = job.folder / "curve.jsonl"
    logged = [row["step"] for row in read_curve(curve)] if curve.exists() else []
    if logged == list(range(1, metrics["steps"] + 1)):
        return None
    return f"reports {metrics['steps']} steps, but its curve has {len(logged)}, up to step {max(logged, default=0)}"


def _model_problem(payload: Path) -> str | None:
    weights = sorted(payload.glob("*.safetensors"))
    for needed in ("config.json", "tokenizer.json"):
        if not (payload / needed).exists():
            return f"its model lacks {needed}"
    if not weights:
        return "its model has no weights"
    for path in weights:
        try:
            strange = next(_not_finite(path), None)
        except (ValueError, KeyError) as error:
            return f"{path.name} is damaged ({error})"
        if strange:
            return f"{strange} in {path.name} contains NaN or infinity"
    return None


def _not_finite(path: Path) -> Iterator[str]:
    """Names of tensors with a NaN or infinite value; format: https://github.com/huggingface/safetensors#format."""
    import numpy as np

    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        start, size = 8 + length, path.stat().st_size
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = start + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if not tensors or end != size:
            raise ValueError(f"{size} bytes, but its header specifies {end}")
        for name, entry in tensors.items():
            if entry["dtype"] not in EXPONENTS:
                continue
            kind, mask = EXPONENTS[entry["dtype"]]
            begin, stop = entry["data_offsets"]
            stream.seek(start + begin)
            for offset in range(begin, stop, PIECE_BYTES):
                bits = np.frombuffer(stream.read(min(PIECE_BYTES, stop - offset)), dtype=kind)
                if ((bits & mask) == mask).any():
                    yield name
                    break
