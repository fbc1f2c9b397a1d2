import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import IMPORTS, alive
from tiny_models import make
from transformers import AutoModelForCausalLM
from waiting import deadline, until

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.language.kinds import kind_of
from pedigree.configs.methods.training import Rlvr, Sampling
from pedigree.pipelines.estimate.needs import Facts, needs_of
from pedigree.pipelines.estimate.shapes import shape_of_config
from pedigree.stages.job.failures import EngineLost, StageError
from pedigree.stages.sampling import engines
from pedigree.stages.sampling.engines import WarmEngines, open_engines, open_sampler, side_by_side
from pedigree.stages.sampling.sampler import (
    SILENT_SHARE,
    Continuation,
    Generation,
    Request,
    architecture,
    check_lengths,
    engine_settings,
    model_context,
    write_version,
)
from pedigree.stages.sampling.vllm_engine import QUEUED, Inline, kv_cache_on_gpus, weight_bytes

PLACEMENT = Placement(sampler_memory_gb=0.25, heartbeat_timeout_s=240)
STOP = [2]
WARM = Sampling(temperature=0.7, max_tokens=12)
GREEDY = Sampling(temperature=0.0, max_tokens=12)
PREFIX = list(range(3, 150))  # longer than any cache block: shared by all requests
CHUNK = [Request([*PREFIX, 200 + number % 5], 1000 + number) for number in range(10)]
GROUP = [Request([*range(3, 22)], number) for number in range(8)]
"""Answers to one prompt of 19 tokens."""

# An engine takes ten seconds to start: one serves the whole module, and whatever needs a fresh one is shown on the same fresh one.


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "a": make(folder / "a"),
        "b": make(folder / "b", seed=1),
        "deep": make(folder / "deep", layers=3),
    }


def sampler(model: Path, context: int = 256, inline: bool = False, **placement):
    changed = PLACEMENT.model_copy(update=placement)
    return open_sampler(model, dtype="fp32", context=context, numerics=Numerics(threads=1), placement=changed, inline=inline)


@pytest.fixture(scope="module")
def engine(models):
    with sampler(models["a"]) as opened:
        yield opened


def exact(generations) -> str:
    return json.dumps([dataclasses.asdict(one) for one in generations])


def hf_logprobs(model_folder: Path, request: Request, response: list[int], temperature: float) -> torch.Tensor:
    """log softmax(logits / T) of the response, by transformers: the independent implementation."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = torch.tensor([[*request.prompt_ids, *response]])
    with torch.no_grad():
        logps = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    start = len(request.prompt_ids) - 1
    return logps[start:].gather(-1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.slow
def test_logprobs_are_those_of_the_sampling_distribution(engine, models):
    engine.load(models["a"])
    for request, answer in zip(CHUNK[:4], engine.generate(CHUNK[:4], WARM, STOP), strict=True):
        ours = hf_logprobs(models["a"], request, answer.response_ids, 0.7)
        assert torch.allclose(torch.tensor(answer.logprobs), ours, atol=1e-3)  # the prompt is seen as it was given: no second BOS
        untempered = hf_logprobs(models["a"], request, answer.response_ids, 1.0)
        assert (torch.tensor(answer.logprobs) - untempered).abs().mean() > 0.05


@pytest.mark.slow
def test_requests_of_one_chunk_have_temperatures_of_their_own(engine, models):
    """Equal prompts and seeds: what differs is the temperature, and the log-probs are those of each one's own distribution."""
    engine.load(models["a"])
    prompt, temperatures = CHUNK[0].prompt_ids, (0.3, None, 1.6)
    answers = engine.generate([Request(prompt, 7, temperature) for temperature in (*temperatures, 0.0)], WARM, STOP)
    for temperature, answer in zip(temperatures, answers, strict=False):
        theirs = hf_logprobs(models["a"], CHUNK[0], answer.response_ids, temperature or WARM.temperature)
        assert torch.allclose(torch.tensor(answer.logprobs), theirs, atol=1e-3)
    assert answers[3].response_ids == engine.generate(CHUNK[:1], GREEDY, STOP)[0].response_ids
    assert len({tuple(answer.response_ids) for answer in answers}) == 4


CHOICES = [Continuation([*PREFIX, 200 + number % 3], list(range(210, 212 + number))) for number in range(7)]


@pytest.mark.slow
def test_the_likelihood_of_a_choice_is_the_models_own_and_the_same_in_every_replay(engine, models):
    engine.load(models["a"])
    engine.generate(CHUNK, WARM, STOP)  # leaves the prompts cached, unless they are emptied
    found = engine.score(CHOICES)
    for choice, logprobs in zip(CHOICES, found, strict=True):
        theirs = hf_logprobs(models["a"], Request(choice.prompt_ids, 0), choice.response_ids, 1.0)
        assert len(logprobs) == len(choice.response_ids)
        assert torch.allclose(torch.tensor(logprobs), theirs, atol=1e-3)
    assert engine.score(CHOICES) == found
    engine.load(models["b"])
    assert engine.score(CHOICES) != found


@pytest.mark.slow
def test_seeds_belong_to_requests_and_order_of_asking_does_not_matter_to_them(engine, models):
    engine.load(models["a"])
    twins = [Request(CHUNK[0].prompt_ids, seed) for seed in (5, 6, 5)]
    first, other, again = engine.generate(twins, WARM, STOP)
    assert first.response_ids == again.response_ids != other.response_ids


@pytest.mark.slow
def test_a_load_changes_the_answers_and_another_load_brings_the_old_ones_back(engine, models):
    engine.load(models["a"])
    before = engine.generate(CHUNK, GREEDY, STOP)
    engine.load(models["b"])
    assert [one.response_ids for one in before] != [one.response_ids for one in engine.generate(CHUNK, GREEDY, STOP)]
    engine.load(models["a"])
    assert exact(engine.generate(CHUNK, GREEDY, STOP)) == exact(before)


@pytest.mark.slow
def test_answers_bear_the_version_of_the_weights_that_were_loaded_and_none_where_the_folder_states_none(engine, models, tmp_path):
    engine.load(models["a"])
    untold = engine.generate(CHUNK, GREEDY, STOP)
    assert {one.version for one in untold} == {0} and set(untold[0].as_json()) == {"response_ids", "logprobs", "finish_reason"}
    shutil.copytree(models["a"], tmp_path / "updated")
    write_version(tmp_path / "updated", 7)
    engine.load(tmp_path / "updated")
    told = engine.generate(CHUNK, GREEDY, STOP)
    assert [one.as_json() for one in told] == [{**one.as_json(), "version": 7} for one in untold]
    engine.load(models["a"])
    assert engine.generate(CHUNK, GREEDY, STOP) == untold


@pytest.mark.slow
@pytest.mark.proves("placement.sampler_memory_gb")
def test_a_fresh_engine_has_the_bits_of_any_other_and_a_cache_of_the_configured_size(engine, models):
    """Bits: whatever the other was asked before, and whichever weights it had: tied embeddings, norms and cached keys are all of the new
    ones. Cache: twenty requests begin with eight blocks of 16 tokens each and soon need a ninth; some wait, and some are begun again."""
    engine.load(models["a"])
    engine.generate(CHUNK[3:], WARM, STOP)  # leaves this prefix cached, unless it is emptied
    engine.load(models["b"])
    there = exact(engine.generate(CHUNK, WARM, STOP)), exact(engine.generate(CHUNK, GREEDY, STOP))
    crowd = [Request([*range(100 + number % 10, 220 + number % 10)], number, 0.3 + number % 10 / 10) for number in range(20)]
    sampling, found = Sampling(temperature=1.0, max_tokens=24), {}
    # 2 layers * 2 (k, v) * 2 heads * 32 * 4 bytes = 1 KiB a token: 0.002 GiB hold 131 blocks of 16 tokens
    with sampler(models["b"], sampler_memory_gb=0.002) as fresh:
        assert (exact(fresh.generate(CHUNK, WARM, STOP)), exact(fresh.generate(CHUNK, GREEDY, STOP))) == there
        fresh.stream(crowd, sampling, STOP, found.__setitem__)
        with pytest.raises(StageError, match=r"180 KV-cache blocks.*sampler_memory_gb"):
            fresh.generate(crowd, sampling, STOP)
    assert sorted(found) == list(range(20))
    for number in range(0, 20, 3):
        theirs = hf_logprobs(models["b"], crowd[number], found[number].response_ids, crowd[number].temperature or 1.0)
        assert torch.allclose(torch.tensor(found[number].logprobs), theirs, atol=1e-3)


@pytest.mark.slow
def test_the_stop_token_ends_an_answer_and_is_its_last_token(engine, models):
    engine.load(models["a"])
    (free,) = engine.generate(CHUNK[:1], GREEDY, STOP)
    assert (free.finish_reason, len(free.response_ids)) == ("length", 12)
    stop = free.response_ids[3]
    first = free.response_ids.index(stop)
    (stopped,) = engine.generate(CHUNK[:1], GREEDY, [stop])
    assert (stopped.finish_reason, stopped.response_ids) == ("stop", free.response_ids[: first + 1])
    assert len(stopped.logprobs) == first + 1


@pytest.fixture(scope="module")
def inline(models, tmp_path_factory):
    """What an engine inside its caller's process answers, how much of a short prompt is not computed again for each of its answers, how
    it refuses weights, what it asks vLLM for, and its blocks with those that plans expect: by JSON."""
    program = f"""
import json, sys
from pathlib import Path
import test_sampler as t
with t.sampler(Path({str(models["a"])!r}), inline=True) as engine:
    found = {{"answers": t.exact(engine.generate(t.CHUNK, t.WARM, t.STOP)), "shared": []}}
    step = engine._engine.step
    def seen():
        ended = step()
        found["shared"] += [output.num_cached_tokens for output in ended]
        return ended
    engine._engine.step = seen
    engine.generate(t.GROUP, t.WARM, t.STOP)
    engine._engine.step = step
    try:
        engine.load(Path({str(models["deep"])!r}))
    except t.StageError as error:
        found["refused"] = str(error)
    found["slept"], found["asked of vllm"] = [], []
    vllm = engine._engine
    for name in ("sleep", "wake_up", "collective_rpc"):
        def recorded(*given, name=name, call=getattr(vllm, name), **more):
            found["asked of vllm"].append([name, *given])
            return call(*given, **more)
        setattr(vllm, name, recorded)
    def refused(call, *given):
        try:
            call(*given)
        except t.StageError as error:
            found["slept"].append(str(error))
    for level in (1, 2):
        engine.sleep(level)
        refused(engine.generate, t.CHUNK, t.WARM, t.STOP)
        refused(engine.score, t.CHOICES)
        if level == 2:
            refused(engine.wake)
            engine.load(Path({str(models["a"])!r}))
            refused(engine.generate, t.CHUNK, t.WARM, t.STOP)
        engine.wake()
        found["slept"].append(t.exact(engine.generate(t.CHUNK, t.WARM, t.STOP)) == found["answers"])
import vllm
from types import SimpleNamespace
asked = []
vllm.EngineArgs = lambda **given: asked.append(given)
vllm.LLMEngine.from_engine_args = lambda args: SimpleNamespace(set_weight_version=lambda version: None)
vllm.platforms.current_platform.get_device_total_memory = lambda: 80 << 30
placement = t.Placement(sampler_memory_gb=0.25, gpu_memory_utilization=0.3)
for device, sleeps, head in (("cuda", False, "fp32"), ("cpu", False, "model"), ("cuda", True, "model")):
    given = dict(numerics=t.Numerics(device=device), placement=placement, sleeps=sleeps, head=head)
    t.Inline(t.engine_settings(Path({str(models["a"])!r}), dtype="fp32", context=256, **given))
names = ("gpu_memory_utilization", "kv_cache_memory_bytes", "enable_sleep_mode")
found["asked"] = [[given.get(name) for name in names] for given in asked]
found["heads"] = [given["hf_overrides"] for given in asked]
from pedigree.pipelines.estimate import flops
from pedigree.stages.sampling.cpu_engine import block_size
from pedigree.stages.sampling.vllm_engine import DTYPES
from pedigree.data.host import machine
settings = [("bf16", 72, 1), ("bf16", 257, 1), ("fp32", 72, 1), ("fp32", 256, 1), ("fp32", 257, 1), ("fp32", 72, 2)]
found["blocks"] = dict()
for sets in ((), ("amx_tile",)):
    machine.instruction_sets = lambda root, sets=sets: sets
    ours = [block_size(DTYPES[dtype], context, workers) for dtype, context, workers in settings]
    found["blocks"][" ".join(sets)] = [ours, [flops.block_size("cpu", *setting) for setting in settings]]
Path(sys.argv[1]).write_text(json.dumps(found))
"""
    told = tmp_path_factory.mktemp("inline") / "told.json"
    environment = os.environ | {"PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program, str(told)], check=True, env=environment, timeout=deadline(240))
    return json.loads(told.read_text())


@pytest.mark.slow
def test_inline_and_own_process_give_the_same_bits(engine, models, inline):
    engine.load(models["a"])
    assert inline["answers"] == exact(engine.generate(CHUNK, WARM, STOP))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="vLLM's kernel for blocks of 16 is one of x86")
def test_of_a_short_prompt_all_answers_but_the_first_compute_what_is_beyond_the_last_block_of_16(inline):
    assert sorted(inline["shared"]) == [0] + [16] * 7


@pytest.mark.slow
@pytest.mark.parametrize(("sets", "expected"), [("amx_tile", [None, None, 16, 16, 32, 32]), ("", [16, 32, 16, 16, 32, 32])])
def test_bf16_with_amx_and_long_prompts_keep_the_blocks_of_faster_kernels(inline, sets, expected):
    """Pipelines import no stage: what they know of one is copied, and equal."""
    ours, planned = inline["blocks"][sets]
    assert ours == expected or platform.machine() != "x86_64"
    assert planned == [size or 128 for size in ours]


@pytest.mark.slow
def test_another_architecture_is_refused_by_name_of_what_differs(inline):
    assert "differ in architecture" in inline["refused"] and "num_hidden_layers" in inline["refused"]


@pytest.mark.slow
@pytest.mark.proves("placement.gpu_memory_utilization", on_gpus="what vLLM takes of what it is asked to take")
def test_on_a_gpu_vllm_is_given_the_share_of_memory_and_everywhere_the_size_of_its_cache(inline, models):
    """What it is asked for: what it takes shows on a GPU alone. Its cache is what the plan has for it: vLLM measures nothing, so that a
    trainer that allocates beside it cannot change that."""
    shape = shape_of_config(json.loads((models["a"] / "config.json").read_text()))
    assert shape is not None
    room = int(0.3 * (80 << 30)) - 4 * shape.parameters - (2 << 30)
    config = Rlvr.model_validate(
        {"algorithm": {"type": "grpo"}, "steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_length": 8, "dtype": "fp32",
         "sampling": {"max_tokens": 8}, "optimizer": {"learning_rate": 1e-6}}
    )  # fmt: skip
    plan = kind_of(config)
    facts = Facts(shape, training=plan.training_plan(config), sampling=plan.sampling_plan(config), served=shape)
    engine = needs_of(facts, Numerics(device="cuda"), Placement(gpu_memory_utilization=0.3), 80 << 30).engine
    assert engine is not None and engine.room == room
    assert inline["asked"] == [[0.3, room, False], [None, 268435456, None], [0.3, room, True]]


@pytest.mark.slow
def test_an_engine_that_sleeps_works_only_once_it_is_awake_with_weights(inline):
    """On a CPU vLLM frees nothing: what is shown is what it is asked for, in which order, and that scheduling pauses."""
    asleep, dropped = "the engine is asleep: wake it before it works", "the engine dropped its weights when it went to sleep: load some "
    assert inline["slept"] == [asleep, asleep, True, asleep, asleep, dropped + "before it wakes", asleep, True]
    reload = [["wake_up", ["weights"]], ["collective_rpc", "reload_weights"], ["collective_rpc", "apply_model"]]
    assert inline["asked of vllm"] == [["sleep", 1], ["wake_up"], ["sleep", 2], *reload, ["wake_up"]]


def test_weights_of_a_rank_are_counted_with_what_is_reserved_for_adapters(models):
    shape = shape_of_config(json.loads((models["a"] / "config.json").read_text()))
    assert shape is not None
    assert weight_bytes(models["a"], 2, 1, None) == 2 * shape.parameters
    assert weight_bytes(models["a"], 2, 2, 9) == 2 * (shape.parameters // 2 + shape.adapters(16))  # vLLM has room for 8 or 16


def test_a_share_of_a_gpu_that_leaves_nothing_for_the_cache_is_refused_before_weights_are_read():
    placement = Placement(gpu_memory_utilization=0.25)
    assert kv_cache_on_gpus(80 << 30, placement, 15 << 30) == 3 << 30
    said = r"utilization 0\.25 gives vLLM 20\.0 of a GPU's 80\.0 GiB, but weights take 18\.0 GiB and activations 2\.0 GiB, .*: raise it or"
    with pytest.raises(StageError, match=said):
        kv_cache_on_gpus(80 << 30, placement, 18 << 30)


@pytest.mark.slow
def test_an_engine_computes_its_head_in_the_precision_that_is_asked_for(inline):
    """The name is vLLM's; what it does with it shows in the gap to a trainer with the same head."""
    assert inline["heads"] == [{"head_dtype": "float32"}, {}, {}]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines whose processes never answer; those that were started, in order."""
    begun: list[int] = []

    def start(numerics: Numerics, gpus: Any = None) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        begun.append(process.pid)
        return process

    monkeypatch.setattr(engines, "start", start)
    return begun


def test_a_silent_engine_is_an_error_and_no_hang(models, silent):
    with sampler(models["a"], heartbeat_timeout_s=0.5) as opened:
        with pytest.raises(EngineLost, match=rf"not responded for {SILENT_SHARE * 0.5:.0f} s.*heartbeat_timeout_s"):
            opened.generate(CHUNK, GREEDY, STOP)
        assert not alive(opened.pid)


def test_the_engine_dies_with_its_parent_and_sees_no_ranks():
    program = """
import os, signal
from pathlib import Path
from waiting import until
from pedigree.configs.language.execution import Numerics
from pedigree.stages.sampling.engines import start
engine = Path(f"/proc/{start(Numerics(threads=1)).pid}")
until(lambda: "vllm_engine" in (engine / "cmdline").read_text())  # for a moment it has the environment of its parent
print(engine.name, b"\\0RANK=" in (engine / "environ").read_bytes(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"PYTHONPATH": IMPORTS, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=deadline(120))
    pid, sees_ranks = done.stdout.split()
    assert sees_ranks == "False"
    until(lambda: not alive(int(pid)))


def test_the_process_of_a_further_engine_starts_while_the_one_before_it_works(silent):
    with WarmEngines(Numerics(threads=1)) as ahead:
        ahead.expect(2)
        assert len(silent) == 1
        first = ahead.take()
        assert first.pid == silent[0] and len(silent) == 2
        second = ahead.take()
        assert second.pid == silent[1] and len(silent) == 2
        ahead.expect(2)
        third = ahead.take()
        assert third.pid == silent[2] and len(silent) == 4
    assert [alive(pid) for pid in silent] == [True, True, True, False]
    for process in (first, second, third):
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("broken", "problem", "said"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", StageError, r"vLLM cannot be imported \(libcudart.*: run `make setup`"),
        ("raise RuntimeError('the port is in use')", EngineLost, "RuntimeError: the port is in use"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", EngineLost, "was killed by SIGKILL"),
    ],
)
def test_a_process_that_ended_before_it_was_told_what_to_serve_says_why(models, tmp_path, monkeypatch, broken, problem, said):
    """It is started while requests are prepared: when it is needed, nobody reads what it is told any more."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    settings = engine_settings(models["a"], dtype="fp32", context=256, numerics=Numerics(threads=1), placement=PLACEMENT)
    with WarmEngines(Numerics(threads=1)) as ahead:
        process = ahead.take()
        process.wait(timeout=deadline(60))
        monkeypatch.setattr(ahead, "take", lambda: process)
        with pytest.raises(problem, match=said), open_engines(settings, 1, ahead):
            pass
    assert process.stdin and process.stdin.closed and process.stdout and process.stdout.closed


@pytest.mark.slow
def test_a_stream_of_more_requests_than_the_engine_knows_at_a_time_repeats_itself(engine, models):
    engine.load(models["a"])
    many = [Request([5 + number % 40, 7], number) for number in range(QUEUED + 100)]
    short, runs = Sampling(temperature=1.0, max_tokens=3), []
    for _ in range(2):
        found: dict[int, Generation] = {}
        engine.stream(many, short, STOP, found.__setitem__)
        assert sorted(found) == list(range(len(many)))
        runs.append(exact(found[number] for number in range(len(many))))
    assert runs[0] == runs[1]
    assert [one.response_ids for one in engine.generate(many[:8], short, STOP)] == [found[number].response_ids for number in range(8)]


def environment_of(pid: int) -> bytes:
    """The environment of a process, which the kernel shows as empty until its program is loaded."""
    while not (found := Path(f"/proc/{pid}/environ").read_bytes()):
        os.sched_yield()
    return found


@pytest.mark.proves("placement.engines", on_gpus="which process sees which GPU")
def test_engines_side_by_side_see_gpus_of_their_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    two = Numerics(device="cuda", tensor_parallel=2)
    with WarmEngines(two, engines=2) as ahead:
        ahead.expect(4)  # two architectures
        processes = [ahead.take() for _ in range(4)]
        environments = [environment_of(one.pid).split(b"\0") for one in processes]
        seen = [[entry for entry in entries if entry.startswith(b"CUDA_VISIBLE_DEVICES=")] for entries in environments]
        for process in processes:
            process.kill()
            process.communicate()
    assert seen == [[b"CUDA_VISIBLE_DEVICES=3,5"], [b"CUDA_VISIBLE_DEVICES=6,7"]] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with (
        pytest.raises(StageError, match=r"engine 2 needs GPU 4 of the job, which has 2: raise placement.slots"),
        WarmEngines(two, engines=2),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        ("expandable_segments:True,max_split_size_mb:64", b"expandable_segments:False,max_split_size_mb:64"),
        ("max_split_size_mb:64", b"max_split_size_mb:64"),
    ],
)
def test_an_engine_has_the_allocator_of_its_trainer_without_expandable_segments(monkeypatch, given, handed_on):
    """Their memory has no handle for the other ranks of an engine."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
    with WarmEngines(Numerics(threads=1)) as ahead:
        process = ahead.take()
        settings = [entry for entry in environment_of(process.pid).split(b"\0") if b"_ALLOC_CONF=" in entry]
        process.kill()
        process.communicate()
    assert settings == [b"PYTORCH_ALLOC_CONF=" + handed_on]


def test_when_one_engine_fails_the_others_are_ended_and_its_error_is_told(models, silent):
    """Nobody waits for an engine that is still starting, or in the middle of something."""
    settings = engine_settings(models["a"], dtype="fp32", context=256, numerics=Numerics(threads=1), placement=PLACEMENT)

    def work(number, engine, report):
        if number == 1:
            raise EngineLost("this one")
        engine.generate(CHUNK, WARM, STOP)

    with WarmEngines(Numerics(threads=1), engines=2) as ahead, open_engines(settings, 2, ahead) as both:
        with pytest.raises(EngineLost, match="this one"):
            list(side_by_side(both, work))
        assert not any(map(alive, silent))
        assert "engine" not in [thread.name for thread in threading.enumerate()]


def test_what_the_others_have_told_when_one_fails_is_not_lost():
    """One that dies costs no chunk that another has finished, told or not yet read."""
    told = threading.Barrier(2)

    def work(number, engine, report):
        if number == 1:
            told.wait()
            raise EngineLost("this one")
        for chunk in ("a", "b"):
            report(chunk)
        told.wait()
        engine.ended.wait()
        report("c")

    two: Any = [SimpleNamespace(ended=ended, abandon=ended.set) for ended in (threading.Event(), threading.Event())]
    heard: list[str] = []
    with pytest.raises(EngineLost, match="this one"):
        for chunk in side_by_side(two, work):
            heard.append(chunk)
    assert heard == ["a", "b", "c"]


def workers_of(pid: int) -> list[int]:
    """Processes below a process in which a share of a model computes."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and "Worker" in (stat.parent / "cmdline").read_text():
                found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.proves("numerics.tensor_parallel")
def test_an_engine_parts_its_model_over_as_many_workers_as_asked_for(engine, models):
    engine.load(models["a"])
    assert workers_of(engine.pid) == []  # of one rank it computes itself
    (expected,) = engine.generate(CHUNK[:1], GREEDY, STOP)
    two = Numerics(threads=1, tensor_parallel=2)
    with open_sampler(models["a"], dtype="fp32", context=256, numerics=two, placement=PLACEMENT, inline=False) as parted:
        (answer,) = parted.generate(CHUNK[:1], GREEDY, STOP)
        assert len(workers_of(parted.pid)) == 2 and answer.response_ids == expected.response_ids


def test_a_context_is_found_under_whichever_name_and_in_the_part_that_reads_text(tmp_path):
    from transformers import BloomConfig, Gemma3Config, GPT2Config

    for number, (config, context) in enumerate([(GPT2Config(n_positions=77), 77), (Gemma3Config(), 131072)]):
        config.save_pretrained(tmp_path / str(number))
        assert model_context(tmp_path / str(number)) == context
    BloomConfig().save_pretrained(tmp_path / "alibi")
    with pytest.raises(StageError, match="does not specify max_position_embeddings"):
        model_context(tmp_path / "alibi")


def test_without_vllm_the_error_names_package_and_remedy(models, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # what Python leaves of a package that is not there
    settings = {"numerics": Numerics().model_dump(), "placement": PLACEMENT.model_dump(), "model_folder": str(models["a"]), "context": 256}
    with pytest.raises(StageError, match="make setup"):
        Inline(settings)


def test_architecture_ignores_names_and_token_roles_only(models, tmp_path):
    shutil.copytree(models["a"], tmp_path / "renamed")
    file = tmp_path / "renamed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_name_or_path": "elsewhere", "eos_token_id": 5}))
    assert architecture(tmp_path / "renamed") == architecture(models["a"]) != architecture(models["deep"])


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Request([], 1), "the prompt of request 1 has no tokens"),
        (Continuation([1, 2], []), "the response of request 1 has no tokens"),
        (Continuation([], [1]), "the prompt of request 1 has no tokens"),
        (Request([1] * 16, 1), "request 1 has 16 tokens and the engine draws up to 1: .* the context of 16; drop it, lower max_tokens"),
        (Continuation([1] * 8, [2] * 8), "request 1 has 16 tokens"),
    ],
)
def test_a_request_that_cannot_be_answered_is_named(request_, problem):
    fitting = Continuation([1] * 8, [2] * 7)
    check_lengths([fitting, Request([1] * 15, 1)], 1, 16)
    with pytest.raises(StageError, match=problem):
        check_lengths([fitting, request_], 1, 16)
