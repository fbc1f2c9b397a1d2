"""Exit code 0 is not success: what a stage must have left."""

import hashlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.data.artifacts.artifacts import ArtifactError, write_json
from pedigree.data.chat.chat_template import ChatError
from pedigree.data.records import records
from pedigree.data.store.storage import StoreError
from pedigree.stages.__main__ import cause_of
from pedigree.stages.job.failures import EngineLost, NotFinite, StageError
from pedigree.stages.job.job import Job
from pedigree.stages.job.postconditions import other_template, templates_of, unmet
from pedigree.stages.verifiers import VerifierError

SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS = [{"id": "1", "source": "s", "messages": SAID}, {"id": "2", "source": "s", "messages": SAID}]


def a_job(folder: Path) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    return Job(folder=folder, address="r/s", key="k", numerics=Numerics(), placement=Placement(), source_files={})


def trained(folder: Path, weights: dict[str, torch.Tensor], steps: tuple[int, ...] = (1, 2)) -> Job:
    job = a_job(folder)
    payload = job.out / "payload"
    payload.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        write_json(payload / name, {})
    save_file(weights, payload / "model.safetensors")
    for step in steps:
        job.log(step, loss=1.0)
    return job


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    """Against torch, on all that a format can hold: the largest number is one, the next bit pattern is infinity."""
    weights = {"a": torch.ones(3, dtype=dtype), "b": torch.full((2, 2), torch.finfo(dtype).max, dtype=dtype)}
    assert unmet("policy", {"steps": 2}, trained(tmp_path / "sound", weights)) is None
    weights["b"][1, 1] = value
    assert not torch.isfinite(weights["b"]).all()
    assert unmet("policy", {"steps": 2}, trained(tmp_path / "x", weights)) == "b in model.safetensors contains NaN or infinity"


def test_a_trained_model_has_the_template_of_the_one_that_it_began_with(tmp_path):
    policy, judge, out = (tmp_path / name / "payload" for name in ("policy", "judge", "out"))
    for folder, template in ((policy, "{{ messages }}"), (out, "{{ messages }}"), (judge, "other")):
        folder.mkdir(parents=True)
        (folder / "chat_template.jinja").write_text(template)
    inputs: dict[str, Any] = {
        "policy": {"sft": Mock(payload=policy)},
        "judge": {"it": Mock(payload=judge)},
        "data": {"rows": Mock(payload=tmp_path)},
    }
    templates = templates_of(inputs, out)
    assert templates.keys() == {"policy/sft", "judge/it", "out"} and other_template(templates) is None
    assert templates["out"] == hashlib.sha256(b"{{ messages }}").hexdigest()
    (out / "chat_template.jinja").write_text("{{ messages }} ")
    assert "has the chat template" in (other_template(templates_of(inputs, out)) or "")
    (out / "chat_template.jinja").unlink()
    assert "has the chat template None" in (other_template(templates_of(inputs, out)) or "")


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    job = trained(tmp_path, {"a": torch.ones(100)})
    path = job.out / "payload" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "model.safetensors is damaged" in str(unmet("reward_model", {"steps": 2}, job))
    path.write_bytes(b"")
    assert "model.safetensors is damaged" in str(unmet("reward_model", {"steps": 2}, job))
    path.unlink()
    assert unmet("policy", {"steps": 2}, job) == "its model has no weights"


@pytest.mark.parametrize("steps", [(1,), (1, 3), (1, 2, 2), (2, 1), ()])
def test_a_curve_that_lacks_or_repeats_a_step(tmp_path: Path, steps: tuple[int, ...]) -> None:
    problem = unmet("policy", {"steps": 2}, trained(tmp_path, {"a": torch.ones(1)}, steps))
    assert problem and problem.startswith("reports 2 steps")


def test_rows_that_were_not_written(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    assert unmet("conversation", {"rows": 2}, job) == "wrote no payload"
    records.save(job.out, "conversation", ROWS)
    assert unmet("conversation", {"rows": 2}, job) is None
    assert unmet("conversation", {"rows": 3}, job) == "reports 3 rows but wrote 2"
    records.save(job.out, "conversation", ROWS[:0])
    assert unmet("conversation", {"rows": 0}, job) == "wrote no payload"
    records.save(job.out, "scores", [])
    assert unmet("scores", {"rows": 0}, job) == "wrote no rows to rows.jsonl"


def test_every_failure_has_its_cause(tmp_path: Path) -> None:
    io = "I/O error: as the system words it (os error"  # libraries in Rust
    words: dict[str, list[Exception]] = {
        "refused": [
            RuntimeError("CUDA error: no kernel image is available for execution on the device"),
            RuntimeError("Found no NVIDIA driver on your system"),
            EngineLost("lost engine: RuntimeError: Unsupported head dim: 16"),
            RuntimeError("head_dim=16 unsupported"),
            *(PedigreeError("x"), StageError("x"), ChatError("x"), ArtifactError("x"), VerifierError("x"), StoreError("x", False)),
        ],
        "bug": [
            *(KeyError("x"), IndexError("x"), ValueError("x"), TypeError("x"), AttributeError("x"), NameError("x")),
            *(AssertionError("x"), ImportError("x"), ZeroDivisionError("x"), NotImplementedError("x"), RecursionError("x")),
        ],
        "not_finite": [NotFinite("the loss is nan")],
        "out_of_memory": [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate"), torch.OutOfMemoryError("out of memory")],
        "disk_full": [OSError(28, "No space left on device"), *map(SafetensorError, (f"Error: {io} 28)", f"Error: {io} 122)"))],
        "not_writable": [OSError(30, "Read-only file system"), PermissionError(13, "Permission denied"), SafetensorError(f"{io} 30)")],
        "storage": [OSError(5, "Input/output error"), StoreError("x", True)],
        "collective": [
            RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"),
            torch.distributed.DistBackendError("NCCL"),
        ],
        "lost_engine": [EngineLost("lost engine: vLLM was killed")],
        "crashed": [RuntimeError("something else"), RuntimeError("start (0) + length (5) exceeds dimension size (3).")],
    }
    for cause, errors in words.items():
        assert [cause_of(error, tmp_path) for error in errors] == [cause] * len(errors)


def test_bits_of_numpy_and_torch_agree() -> None:
    """The exponent masks, by hand: 8 bits from bit 23 (fp32), 8 from bit 7 (bf16), 5 from bit 10 (fp16)."""
    from pedigree.stages.job.postconditions import EXPONENTS

    assert {name: mask for name, (_, mask) in EXPONENTS.items()} == {"F32": 0xFF << 23, "BF16": 0xFF << 7, "F16": 0x1F << 10}
    assert all(np.dtype(kind).itemsize == (4 if name == "F32" else 2) for name, (kind, _) in EXPONENTS.items())
