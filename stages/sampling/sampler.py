"""Interface to an engine: token ids in, sampled token ids and their log-probabilities out.

The unit of reproducibility is one call: a fixed, ordered list of requests, each with its own seed, submitted together to an idle
offline engine with an empty prefix cache. Equal lists give equal bits in every fresh process; the same request in another list
may round differently. Scheduling does not depend on clocks or arrival times.

Prompts are token ids and are used unchanged: no tokenizer is loaded, no token is prepended. Log-probs are those of the sampled
distribution (after temperature and top-p).
"""

import json
import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pedigree.configs.base.frozen import HeadPrecision, digest
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.training import Sampling
from pedigree.data.host.pipes import readable
from pedigree.data.records.records import FinishReason
from pedigree.stages.job.failures import EngineLost, StageError

SILENT_SHARE = 0.9
"""Share of the job's heartbeat timeout after which an unresponsive engine counts as lost, so that the job itself is not killed."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
IRRELEVANT_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", *SPECIAL_TOKENS)
"""Keys of config.json in which models of the same architecture may differ."""

VERSION_FILE = "weights_version"


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


@dataclass(frozen=True)
class WeightPart:
    """Some of the weights of a version."""

    tensors: list[tuple[str, str, list[int]]]
    """Name as in a Hugging Face folder, dtype, shape."""
    begins: bool
    version: int | None
    """Version of the weights, in their last part."""
    path: str = ""
    """Host memory that holds the tensors one after the other, see `weight_parts.offsets`."""
    handles: str = ""
    """What `torch.multiprocessing` sends for tensors on GPUs, by UUID of each GPU that has them: pickled, in base64."""


def request_key(one: Request | Continuation) -> dict[str, Any]:
    """Everything that determines its answer, as JSON."""
    return {name: value for name, value in vars(one).items() if value is not None}


@dataclass(frozen=True)
class Generation:
    """One answer."""

    response_ids: list[int]
    """Sampled tokens; with finish reason `stop` the last one is the stop token."""
    logprobs: list[float]
    """Log-probability of each token of `response_ids` under the distribution from which it was sampled."""
    finish_reason: FinishReason
    version: int = 0
    """Version of the weights that sampled its first token (`write_version`)."""
    changes: list[list[int]] = field(default_factory=list)
    """[version, index of its first token] of weights that were loaded in flight."""

    @property
    def versions(self) -> list[tuple[int, int]]:
        """(version, number of tokens) of all weights that sampled it, in order."""
        starts = [[self.version, 0], *self.changes, [0, len(self.response_ids)]]
        return [(version, end - start) for (version, start), (_, end) in pairwise(starts)]

    def as_json(self) -> dict[str, Any]:
        """As sent and recorded: without version 0, that of every model that is not in training."""
        return {name: value for name, value in vars(self).items() if name not in ("version", "changes") or value}


def write_version(folder: Path, version: int) -> None:
    """Record the version of the weights in a folder, for `read_version`: in training, the number of updates that made them."""
    (folder / VERSION_FILE).write_text(str(version))


def read_version(folder: Path) -> int:
    """Version of the weights in a folder; 0 if none is recorded. Engines read it with the weights, so that it is of what they loaded, not
    of what they were asked to load."""
    path = folder / VERSION_FILE
    return int(path.read_text()) if path.exists() else 0


def seed_of(*parts: str | int) -> int:
    """A 31-bit seed for one answer, from the names that identify it: independent of order, chunking and restarts."""
    return int(digest(list(parts))[:8], 16) >> 1


Beat = Callable[[int], None]
"""Called regularly during generation with the number of finished requests."""
Arrived = Callable[[int, Generation], None]
"""Called with the index of a request in its list, and its answer."""


class Sampler(ABC):
    """An engine with one model's weights."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, stop_ids: Sequence[int], beat: Beat | None = None
    ) -> list[Generation]:
        """Answer one chunk, in order; equal chunks give equal bits. Arguments and errors as for `stream`."""
        found: dict[int, Generation] = {}
        self.stream(requests, sampling, stop_ids, found.__setitem__, beat, chunk=True)
        return [found[number] for number in range(len(requests))]

    @abstractmethod
    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        arrived: Arrived,
        beat: Beat | None = None,
        *,
        chunk: bool = False,
    ) -> None:
        """Answer any number of requests, as many at a time as fit into the KV cache, from an empty prefix cache.

        Which requests run together depends on their order, the lengths of their answers and the size of the cache: equal request lists
        give equal bits on engines of the same size; the same request in another list may round differently.

        Args:
            requests: in starting order.
            sampling: temperature (0 is greedy; requests may override it), top-p, maximum answer length.
            stop_ids: tokens that end an answer.
            arrived: called with the index of a request and its answer, as soon as it is finished.
            beat: called with the progress.
            chunk: whether all requests must fit into the KV cache together, so that its size does not change the bits.

        Raises:
            StageError: a prompt with its answer is longer than the context, or a chunk does not fit into the KV cache.
            EngineLost: the engine died or stopped responding.
        """

    @abstractmethod
    def score(self, continuations: Sequence[Continuation], beat: Beat | None = None) -> list[list[float]]:
        """The log-probability of each response token after its prompt, for one chunk, in order; nothing is sampled.

        Log-probabilities are the model's own, without temperature.

        Raises:
            StageError: a prompt with its response is longer than the context, or one of them has no tokens.
            EngineLost: the engine died or stopped responding.
        """

    @abstractmethod
    def load(self, model_folder: Path) -> None:
        """Replace the weights by those of another folder of the same architecture, and empty the prefix cache. Another thread may stream
        from an engine opened with `in_flight`.

        Raises:
            StageError: the folder holds another architecture.
        """

    @abstractmethod
    def update(self, part: WeightPart) -> None:
        """Take a part of new weights of the same architecture; with the last one, empty the prefix cache. Until then the engine cannot
        answer."""

    @abstractmethod
    def load_adapters(self, folder: Path) -> None:
        """Apply adapters (`stages.training.adapters.write_adapters`) to the weights, and empty the prefix cache. The engine must have been
        opened for adapters."""

    @abstractmethod
    def ready(self) -> None:
        """Wait until the engine has loaded its model and allocated its memory.

        Raises:
            StageError: vLLM is not installed or cannot serve the model.
            EngineLost: the engine died or stopped responding.
        """

    @abstractmethod
    def sleep(self, level: Literal[1, 2]) -> None:
        """Free the GPU memory of weights and KV cache until `wake`, for an engine opened with `sleeps`. On a CPU nothing is freed.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them, and `load` or all parts of an `update` must follow before `wake`.
        """

    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory again, with the weights that were kept, or that were loaded in the meantime.

        Raises:
            StageError: the weights were dropped and none were loaded.
        """

    @abstractmethod
    def close(self) -> None:
        """Shut the engine down."""


def engine_settings(
    model_folder: Path,
    *,
    dtype: str,
    context: int,
    numerics: Numerics,
    placement: Placement,
    adapter_rank: int | None = None,
    sleeps: bool = False,
    head: HeadPrecision = "model",
    in_flight: bool = False,
) -> dict[str, Any]:
    """Settings of an engine.

    Args:
        model_folder: Hugging Face folder with safetensors.
        dtype: `bf16` or `fp32`, for weights, activations and KV cache.
        context: maximum tokens of a prompt with its answer; at most the model's context.
        adapter_rank: maximum rank of adapters for `load_adapters`, at most `MAX_SERVED_RANK`; None for an engine without adapters.
        sleeps: on GPUs, whether `Sampler.sleep` will be called.
        head: `fp32` for products of the output head in fp32.
        in_flight: whether weights may be loaded between two tokens of running requests, whose KV cache is then recomputed.
    """
    return {
        "model_folder": str(model_folder),
        "dtype": dtype,
        "context": context,
        "numerics": numerics.model_dump(),
        "placement": placement.model_dump(),
        "adapter_rank": adapter_rank,
        "sleeps": sleeps,
        "head": head,
        "in_flight": in_flight,
    }


def architecture(model_folder: Path) -> dict[str, Any]:
    """The part of the model's config that `Sampler.load` requires to be equal: without names, dtype and special tokens."""
    config = json.loads((model_folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in IRRELEVANT_KEYS}


def model_context(model_folder: Path) -> int:
    """Context length of the model in tokens.

    Raises:
        StageError: the config does not specify it, e.g. for a model without positions.
    """
    given = json.loads((model_folder / "config.json").read_text())
    composite = any(isinstance(part, dict) and "model_type" in part for part in given.values())
    found = None if composite else given.get("max_position_embeddings")
    if found is None:
        from transformers import AutoConfig  # imports torch

        config = AutoConfig.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False).get_text_config()
        found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int):
        raise StageError(f"{model_folder}/config.json does not specify max_position_embeddings, so the model's context is unknown")
    return found


def check_lengths(requests: Sequence[Request | Continuation], drawn: int, context: int) -> None:
    """Check that every request has tokens and leaves room for what the engine draws.

    Raises:
        StageError: one does not.
    """
    for number, one in enumerate(requests):
        given = request_key(one)
        if empty := [part.removesuffix("_ids") for part in ("prompt_ids", "response_ids") if given.get(part) == []]:
            raise StageError(f"the {empty[0]} of request {number} has no tokens: check its messages and the chat template")
        length = len(one.prompt_ids) + len(given.get("response_ids", ()))
        if length + drawn > context:
            raise StageError(
                f"request {number} has {length} tokens and the engine draws up to {drawn}: together more than the context of {context}; "
                "drop it, lower max_tokens, or use a model with a longer context"
            )


class Child(Sampler):
    """An engine in a child process (`stages.sampling.engines.start`), without our distributed environment or standard output."""

    def __init__(self, settings: dict[str, Any], process: "subprocess.Popen[bytes]") -> None:
        """
        Raises:
            StageError: the process has ended because vLLM is not installed.
            EngineLost: it has ended for another reason.
        """
        self._context: int = settings["context"]
        self._silence = SILENT_SHARE * settings["placement"]["heartbeat_timeout_s"]
        self._pending = b""
        self._ready = False
        self._process = process
        self._turn, self._writing = threading.Lock(), threading.Lock()
        self._streaming = False
        self._between: Future[None] | None = None
        """Result of an order given while another thread reads a stream."""
        self._broken: BaseException | None = None
        """Why a stream ended early: the rest of it in the pipe does not answer the next order."""
        try:
            self._send(settings)
        except BaseException:  # no caller has the engine yet to close it, and a signal may arrive here
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        arrived: Arrived,
        beat: Beat | None = None,
        *,
        chunk: bool = False,
    ) -> None:
        check_lengths(requests, sampling.max_tokens, self._context)
        feeding = threading.Thread(target=self._feed, args=(requests,), daemon=True)
        settings = {"sampling": sampling.model_dump(), "stop_ids": list(stop_ids), "chunk": chunk}
        self._ask({"do": "stream", "requests": len(requests), **settings}, beat, arrived, feeding.start)
        feeding.join()

    def _feed(self, requests: Sequence[Request]) -> None:
        """Send requests while answers are read: the engine takes lines on demand, and a pipe holds few."""
        with suppress(BrokenPipeError):  # reported by the thread that reads the answers
            for request in requests:
                self._write(request_key(request))

    def score(self, continuations: Sequence[Continuation], beat: Beat | None = None) -> list[list[float]]:
        check_lengths(continuations, 1, self._context)
        return self._ask({"do": "score", "continuations": [request_key(one) for one in continuations]}, beat)

    def load(self, model_folder: Path) -> None:
        self._ask({"do": "load", "folder": str(model_folder)})

    def update(self, part: WeightPart) -> None:
        self._ask({"do": "update", "part": vars(part)})

    def load_adapters(self, folder: Path) -> None:
        self._ask({"do": "load_adapters", "folder": str(folder)})

    def sleep(self, level: Literal[1, 2]) -> None:
        self._ask({"do": "sleep", "level": level})

    def wake(self) -> None:
        self._ask({"do": "wake"})

    def ready(self) -> None:
        if not self._ready:
            self._answer(None)
            self._ready = True

    def abandon(self) -> None:
        """Kill the child immediately."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the child by closing its standard input; it has a few seconds to end its own workers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.abandon()
        self._process.stdout.close()

    def _ask(
        self,
        order: dict[str, Any],
        beat: Beat | None = None,
        arrived: Arrived | None = None,
        sent: Callable[[], None] = lambda: None,
    ) -> Any:
        """Have an order executed; during a stream that another thread reads, between two tokens."""
        with self._turn:
            if self._broken is not None:
                raise self._broken
            self._between = obeyed = Future() if self._streaming else None
            if obeyed is None:
                self.ready()
                self._send(order)
                if arrived is None:
                    return self._answer(beat)
                self._streaming = True
            else:
                with suppress(BrokenPipeError):  # reported by the thread that reads the stream
                    self._write(order | {"between": True})
        if obeyed is not None:
            return obeyed.result()
        sent()
        try:
            while True:  # an order may arrive after the last answer
                self._answer(beat, arrived)
                with self._turn:
                    if self._between is None:
                        self._streaming = False
                        return None
        except BaseException as error:
            with self._turn:
                self._streaming, self._broken = False, error
                if self._between is not None:
                    self._between.set_exception(error)
            raise

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
        with self._writing:
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
            elif "obeyed" in message:
                assert self._between is not None
                obeyed, self._between = self._between, None
                obeyed.set_result(None)
                if message["obeyed"] == "after":
                    return None
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
                self.abandon()  # it may not read either, and closing its input would wait for that
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
