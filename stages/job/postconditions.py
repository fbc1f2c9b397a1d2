"""Checks of every finished stage's output, independent of its own report: rows counted, every step logged, all weights finite, and of a
trained model that training has changed it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.artifacts.artifacts import Artifact, sha256_file
from data.records import records
from stages.job.job import Job, read_curve

if TYPE_CHECKING:  # it loads torch, which stages that train nothing do without
    from stages.job.updates import Update

TEMPLATE_FILE = "chat_template.jinja"
"""In the folder of a model: how its conversations are written."""
EXPONENTS = {"F32": ("uint32", 0x7F800000), "F16": ("uint16", 0x7C00), "BF16": ("uint16", 0x7F80)}
"""safetensors dtype → unsigned type of the same width, and the exponent bits: all of them set is NaN or infinity (IEEE 754)."""
PIECE_BYTES = 64 << 20


def unmet(artifact_type: str, metrics: dict[str, Any], job: Job) -> str | None:
    """Why the output is not that of a finished stage, or None."""
    payload = job.out / "payload"
    if not payload.is_dir() or not any(payload.iterdir()):
        return "wrote no payload"
    if artifact_type in ("policy", "reward_model"):
        return _model_problem(payload) or _steps_problem(metrics, job)
    return _rows_problem(payload, metrics)


def templates_of(inputs: Mapping[str, Mapping[str, Artifact]], payload: Path) -> dict[str, str]:
    """sha256 of the chat template of every model that took part, by port and label, and of the one that was made, under `out`."""
    folders = {f"{port}/{label}": model.payload for port, given in inputs.items() for label, model in given.items()}
    files = {name: folder / TEMPLATE_FILE for name, folder in (folders | {"out": payload}).items()}
    return {name: sha256_file(file) for name, file in files.items() if file.is_file()}


def other_template(templates: Mapping[str, str]) -> str | None:
    """Why a trained model would be asked otherwise than it was trained, or None."""
    start = next((sha256 for name, sha256 in templates.items() if name.startswith("policy/")), None)
    if templates.get("out") == start:
        return None
    return f"the model that it wrote has the chat template {templates.get('out')}, and the policy that it began with {start}"


def not_trained(update: "Update", metrics: dict[str, Any]) -> str | None:
    """Why nothing was trained, or None.

    Args:
        update: of the model against the one that it began as.
        metrics: of the stage.
    """
    if metrics.get("trained_tokens") == 0:
        return "no token reached a gradient: look at the dropped rows or groups in its evidence"
    if metrics.get("informative_groups") == 0:
        return "rewards differed in none of its groups: use prompts of another difficulty, more samples_per_prompt, or a higher temperature"
    if update.vanished:
        return (
            f"the {update.tensors} tensors that it wrote differ from those that it began with by {update.norm:.3g} in all, less than the "
            f"rounding of one weight in {update.dtype}: raise optimizer.learning_rate, train for more steps, or set dtype: fp32"
        )
    return None


def _rows_problem(payload: Path, metrics: dict[str, Any]) -> str | None:
    files = records.row_files(path.name for path in payload.iterdir())
    if not files:
        return "wrote no rows"
    rows = sum(records.count(payload / name) for name in files)
    if rows == 0:
        return f"wrote no row into {files[0]}"
    reported = metrics.get("rows")
    return f"reports {reported} rows and wrote {rows}" if isinstance(reported, int) and reported != rows else None


def _steps_problem(metrics: dict[str, Any], job: Job) -> str | None:
    """The curve holds every step once, in order, up to the last."""
    if "steps" not in metrics:
        return None
    curve = job.folder / "curve.jsonl"
    logged = [row["step"] for row in read_curve(curve)] if curve.exists() else []
    if logged == list(range(1, metrics["steps"] + 1)):
        return None
    return f"reports {metrics['steps']} steps, and its curve has {len(logged)}, up to step {max(logged, default=0)}"


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
            return f"{strange} in {path.name} holds NaN or infinity"
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
            raise ValueError(f"{size} bytes where its header says {end}")
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
