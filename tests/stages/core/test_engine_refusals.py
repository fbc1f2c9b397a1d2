"""What vLLM and its libraries refuse for good is final at the first attempt and has a remedy; what may pass is tried again."""

import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from pedigree.pipelines.jobs.attempts import RETRIED
from pedigree.stages.__main__ import cause_of
from pedigree.stages.job.failures import EngineLost, StageError, lasting
from pedigree.stages.sampling.vllm_engine import OTHER, refusal

FOR_GOOD = [
    ("config/model.py", "must be divisible by tensor parallel size", ValueError("heads (6) must be divisible by")),
    ("config/model.py", "Unknown quantization method", ValueError("Unknown quantization method: nosuch. Must be one of ['awq']")),
    ("config/vllm.py", "is not supported for the current GPU", ValueError("fp8 is not supported for the current GPU")),
    ("config/vllm.py", "is not supported for quantization", ValueError("torch.float32 is not supported for quantization method awq.")),
    ("config/model.py", "than the derived max_model_len", ValueError("max_model_len (9) is greater than the derived max_model_len")),
    ("config/model.py", "This model does not support `--runner generate`", ValueError("This model does not support `--runner generate`.")),
    ("model_executor/models/registry.py", "are not supported for now", ValueError("Model architectures ['X'] are not supported for now.")),
    ("v1/core/kv_cache_utils.py", "cache is needed, which is larger than", ValueError("(1 GiB KV cache is needed")),
    ("v1/core/kv_cache_utils.py", "No available memory for the cache blocks", ValueError("No available memory for the cache blocks.")),
    ("model_executor/model_loader/default_loader.py", "Cannot find any model weights", RuntimeError("Cannot find any model weights")),
    ("config/device.py", "Failed to infer device type", RuntimeError("Failed to infer device type, please set")),
    ("platforms/cuda.py", "No valid attention backend found", ValueError("No valid attention backend found for cuda with head_size=16")),
    ("model_executor/layers/rotary_embedding/__init__.py", "Unknown RoPE scaling type", ValueError("Unknown RoPE scaling type nosuch")),
    (None, "", RuntimeError("Unsupported head dim: 16")),
    (None, "", RuntimeError("Unexpected head dim size, 16")),
    (None, "", RuntimeError("FlashAttention forward only supports head dimension at most 256")),
    (None, "", RuntimeError("FlashAttention only supports Ampere GPUs or newer.")),
    (None, "", NotImplementedError("head_dim=16 unsupported")),
    (None, "", RuntimeError('"rms_norm" not implemented for \'Half\'')),
    (None, "", RuntimeError("CUDA error: the provided PTX was compiled with an unsupported toolchain")),
    (None, "", AssertionError("Torch not compiled with CUDA enabled")),
    (None, "", RuntimeError("The size of tensor a (64) must match the size of tensor b (128) at non-singleton dimension 1")),
    (None, "", RuntimeError("start (0) + length (512) exceeds dimension size (256).")),
    (None, "", struct.error("unpack requires a buffer of 8 bytes")),
    (None, "", OSError("Can't load the configuration of 'x'")),
    (None, "", AssertionError()),
]  # fmt: skip


@pytest.mark.parametrize(("file", "stem", "error"), FOR_GOOD)
def test_what_an_engine_refuses_for_good_is_final_and_has_a_remedy(file, stem, error, tmp_path):
    """The first two columns show where this version of vLLM says so, and nothing where a kernel or a library does."""
    if file:
        vllm = find_spec("vllm")
        assert vllm and vllm.origin and stem in (Path(vllm.origin).parent / file).read_text()
    found = refusal(error)
    assert cause_of(found, tmp_path) == "refused"
    what, _, remedy = str(found).rpartition(": ")
    assert what.startswith("vLLM cannot serve the model under this profile: ") and remedy


REMEDIES = [
    ("Unknown quantization method: nosuch", "use the model's weights in bf16 or fp32"),
    ("max_model_len (9) is greater than the derived max_model_len", "lower the lengths of prompts"),
    ("Model architectures ['X'] are not supported for now.", "use a model of an architecture that"),
    ("No available memory for the cache blocks.", "raise placement.sampler_memory_gb"),
    ("Following weights were not initialized from checkpoint: {'a'}", "copy both from the model's origin"),
    ("something else", OTHER),
]


@pytest.mark.parametrize(("text", "remedy"), REMEDIES)
def test_a_refusal_is_told_with_the_remedy_of_its_kind(text, remedy):
    assert remedy in str(refusal(ValueError(text)))


PASSING = [
    ValueError("Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less than desired GPU memory utilization (0.9, 72.0 GiB)."),
    AssertionError("Error in memory profiling. Initial free memory 5 GiB, current free memory 6 GiB."),
    RuntimeError("CUDA out of memory occurred when warming up sampler with 256 dummy requests."),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("NCCL error: remote process exited or there was a network error; Cuda failure 'operation not supported'"),
    RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"),
    RuntimeError("The server socket has failed to listen: EADDRINUSE, address already in use"),
    TimeoutError("RPC call to load_model timed out."),
    OSError(5, "Input/output error"),
    OSError(95, "Operation not supported"),
    MemoryError(),
    Exception("WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."),
]


@pytest.mark.parametrize("error", PASSING)
def test_what_memory_storage_or_other_ranks_prevented_is_tried_again(error, tmp_path):
    found = refusal(error)
    assert cause_of(found, tmp_path) in RETRIED and not isinstance(found, StageError)
    lost = EngineLost(f"lost engine: {type(found).__name__}: {found}")  # as the parent of an engine's process raises it
    assert cause_of(lost, tmp_path) in RETRIED


AT_WORK = ["Unsupported head dim: 16", "Unexpected head dim size, 16", "head_dim=16 unsupported", "'rms' not implemented for 'Half'"]


@pytest.mark.parametrize("text", AT_WORK)
@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, EngineLost])
def test_a_kernel_that_refuses_at_the_first_request_is_final_too(text, kind, tmp_path):
    assert cause_of(kind(text), tmp_path) == "refused" and lasting(kind(text))


def test_errors_of_a_disk_and_of_our_own_code_are_not_taken_for_those_of_a_kernel(tmp_path):
    assert cause_of(OSError(95, "Operation not supported"), tmp_path) == "storage"
    assert cause_of(ValueError("x is not supported"), tmp_path) == "bug"


class Wrong(BaseModel):
    x: int

    @field_validator("x")
    @classmethod
    def refuse(cls, x: int) -> int:
        raise ValueError("Model architectures ['X'] are not\n  supported for now.")


def test_a_refusal_of_a_setting_of_vllm_is_told_in_one_line_without_pydantics_words():
    with pytest.raises(ValidationError) as caught:
        Wrong(x=1)
    said = str(refusal(caught.value))
    assert "Model architectures ['X'] are not supported for now." in said
    assert not any(word in said for word in ("\n", "validation error", "Value error", "pydantic"))
