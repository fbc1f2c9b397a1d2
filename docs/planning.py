"""docs/plan.md: what a plan states, by which formulas, and how far off it was where that could be measured."""

from pathlib import Path
from tempfile import TemporaryDirectory

from configs.base.project import Project
from configs.language.execution import GPUS, MOST_THREADS, SLOT_BYTES, Machine
from configs.language.recipe import load_recipe
from pipelines.estimate import amounts, estimates, memory, work
from pipelines.estimate.estimates import Estimates
from pipelines.estimate.shapes import FAMILIES, KNOWN
from pipelines.run.runs import load_execution

ROOT = Path(__file__).resolve().parents[1]

HEAD = """# What a plan states

<!-- Written by `python -m docs.generate`; do not edit. -->

`pedigree plan RECIPE` says, before anything is downloaded or started, what each stage that would run needs under the profile: memory of
a rank, tokens, steps, time, GPU-hours, checkpoints and disk. A stage that needs more memory than the profile's machine has is named with
what it lacks, by how much, and the settings that would make it fit, each of which was tried out in the estimate; the exit code is 1 then,
and `pedigree run` refuses it before any job starts. A stage that the cache gives back (`cached`) runs no job: it takes no time and is not
refused, unless the cache turns out to be damaged, and then just before its job would start. `--json` has every term in bytes.

```console
$ pedigree plan demo --execution gpu8
$ pedigree plan demo --execution gpu8 --json
```

**Which machine.** [`machine`](profiles.md#machine) in the profile: `{{gpu: h100, gpus_per_node: 8, host_memory_gb: 1024}}`, or its numbers.
Where a profile for GPUs says nothing, the driver of the machine that plans is asked; on CPUs, the kernel. Where nobody knows, the terms
are stated and nothing is refused. If a refusal is wrong for your machine, say there what it has.

**Which model.** The shape of a sourced model from its artifact, of a folder from its `config.json`, of a random one from the recipe, of a
model of the hub from the hub's cache or the table below. Of another one the plan says that its shape is unknown, which is no error: once
its `source_model` stage has run, it is known.

**How many tokens.** `~`: from the rows of finished stages, by the text of the first {looked} rows: digits one by one, {characters:g}
characters of anything else a token, {turn:g} tokens for each turn. `<`: an upper bound, from counts and lengths that the recipe allows.
Of data that is not here yet the recipe's `count` is taken, else the number of rows that known data sets and benchmarks are known to have;
else it is unknown.

**How long.** A stage that has run on such a machine takes as long as it took, by its tokens; another one is as fast as finished stages of
its kind in the recipe. Otherwise its operations at `utilization` of the peak, and for generation bytes at `bandwidth_utilization` of the
bandwidth, and the time to start: {start:g} s on GPUs; on a CPU {none:g} s without a model, {torch:g} s with torch, {vllm:g} s with
DeepSpeed or vLLM, {both:g} s with both. A stage without a model on a CPU handles {rows:,.0f} rows a second. These are assumptions; the
profile can replace both utilizations. How long a download or a server takes is unknown. So times and GPU-hours are `~` also where the
tokens are a bound. GPU-hours count every GPU that a stage holds. The time of the whole run takes into account that stages run side by side,
as far as the profile's `slots` allow.

On a CPU the peak is measured: a process of its own multiplies matrices for two seconds, once on a machine, and leaves the rates of a core
in `~/.cache/pedigree/product-rates` (`pedigree doctor` shows them; a deleted file is measured again). Processor time counts, so that other
work hardly disturbs it; the estimate is that of a machine with nothing else to do. Products of bf16 are taken to be as fast as those of
fp32 where they go through fp32 (`bf16_products`). Without a `utilization` in the profile, {share:.0f} % of the peak counts: SFT of
SmolLM2-135M reached 53 % in bf16 on two cores of an AMD EPYC with bf16 units, and 95 %, by processor time, in fp32 on a Xeon without;
sampling by vLLM 43 % on the EPYC. The bandwidth is measured too, and all of it counts unless the profile gives a `bandwidth_utilization`.
Where only an upper bound on the tokens is known, {bound:.0f} % of it counts. `pedigree run` states the time before it starts and shows how
much of the whole run is left; that estimate improves with each stage that ends.

**How a CPU is shared.** With `auto`, as in the profile `cpu`, there is a slot for each physical core that may be used (affinity and the
quotas of control groups count, hyper-threads do not), but no more than one for each {slot:g} GiB of memory. A stage that computes takes as
many threads as there are cores, at most {threads} and at most the `slots` that a profile gives as a number; ranks or `engines` of a stage
divide them. A stage that reads rows takes one. In a step of SFT of SmolLM2-135M in fp32 with 512 tokens, one thread alone computes 6 %;
this was measured with two threads, which together used as much processor time as one thread by itself. So by Amdahl's law 2, 4, 8 and 16
threads are 1.9, 3.4, 5.6 and 8.4 times as fast as one, memory not counted: two jobs on four cores each do 20 % more than one on eight, but
each takes 1.7 times as long. As most stages of a recipe wait for the one before, up to eight cores one job on all of them ends sooner; with
sixteen, two jobs on eight each do 34 % more than one. The measurement is of two cores; what follows for more is calculated.

**How much disk.** That of the artifacts. A job moves what it made into its place, and DVC copies it into its cache (`.dvc/cache`), which
takes as much again: on ext4 an output of 5 MB takes 10 MB. Only where the file system has reflinks (Btrfs, XFS) do both share their blocks.
So without them twice the stated disk must be free, with checkpoints on top; a stage that is `cached` has its half already.

After a run the report has a section *Plan and run*: what would have been planned for each finished stage, as if it had never run,
beside the peak memory, tokens and seconds that it took. The peak is in `run.json`, per attempt: `host`, the process of the first rank,
`child`, the largest process that it started (vLLM), and on GPUs `gpu`, what torch allocated, in bytes.

## Formulas

Ψ parameters, Ψ_t those that are trained, R ranks, e bytes of the compute dtype, T tokens of one pass; L layers, H hidden width, A heads, K
key heads, D width of a head, F width of the MLP, V vocabulary, N parameters that a token is multiplied by, s tokens of a document. The
peak is the larger of loading and the sum of all terms of a step. Sums, not maxima over phases: it is an upper bound by a few percent.

| term | formula | source |
|---|---|---|"""
ASSUMED = """
`runtime` is what a process has before any tensor: {cuda} of a GPU, {cpu} of host memory on CPUs; an assumption, as the {overhead} that
vLLM is given beside weights and cache. A mixture's experts count with those that a token passes; with tensor parallelism an engine's
weights are divided evenly, and each rank has at least one key head.

Not in the estimate: fragmentation of the allocator, attention that keeps scores (`eager`, soft caps as in Gemma 2: activations are 20 %
more than said), `sdpa` where it repeats key heads, the fp32 copies of what is multiplied on a CPU without bf16 units (of the head 4
bytes for each weight and each logit of a chunk), stages side by side on one GPU, reading data on the host, and the network.
"""
ERROR = """## How far off

A training step of SmolLM2-135M on CPUs, two micro-batches a step, by torch's own account of all tensors (`planned / measured` of the
peak, the bucket as torch counts it, whole). `tests/stages/test_memory_estimates.py` holds a small model to 25 % in the same way, what
stays between steps to 3 %, and activations of five architectures to 2 %.

| ranks | ZeRO | dtype | tokens a pass | planned | measured | planned / measured |
|---|---|---|---|---|---|---|"""
MEASURED: tuple[tuple[int, int, str, str, float, float], ...] = (
    (1, 1, "bf16", "2048", 4.443, 4.357),
    (1, 1, "bf16", "2048, layers computed again", 2.914, 2.773),
    (1, 2, "bf16", "512", 4.614, 4.228),
    (1, 2, "fp32", "512", 5.781, 5.497),
    (1, 3, "bf16", "512", 5.614, 5.497),
    (2, 1, "bf16", "512", 2.269, 2.156),
    (2, 2, "bf16", "512", 3.538, 3.152),
    (2, 3, "bf16", "512", 4.672, 4.343),
)
"""Ranks, ZeRO stage, dtype, tokens of a pass, planned and measured peak in GB."""
JOBS = """Whole jobs of `tiny` on CPUs, by the largest memory of their processes (`run.json`), planned and measured in GB:

| sft | reward_model | preference_train | rlvr | sample | judge | source_model |
|---|---|---|---|---|---|---|
| 0.84, 0.87 | 0.83, 0.66 | 0.84, 0.68 | 2.7, 2.6 | 1.9, 1.9 | 0.82, 0.58 | 0.81, 0.57 |

There `runtime` and vLLM's process are nearly all. With models of real size the plan is short of what a process takes on a CPU, because
glibc keeps what it was given: SFT of SmolLM2-135M in `demo` took at least 4.9 GB, planned 4.1 GB; without our allocator settings, at 2048
tokens a pass, 6.3 GB beside the 4.4 GB of torch's tensors. This comes on top of the plan on a CPU."""
PUBLISHED = "tulu3_8b"
"""The recipe whose `published.hardware` has what its stages took."""
CARRIES_OVER = """
{jobs}

What of this holds on GPUs: the states of a step (weights, gradients, optimizer, buckets) are the same tensors there, counted exactly.
Activations are those of the same modules, but for attention, whose kernel there keeps no fp32 result; that term is derived, not
measured. Not measured at all: CUDA's own memory and fragmentation, vLLM's overhead, `offload_optimizer`'s share of either side, the
time of anything on a GPU, and so `utilization`. Take the first run's section *Plan and run* as the measurement, and set `machine` by it.

## Beside published runs

Tülu 3 8B trained on H100s ([flagship.md](flagship.md#tulu3_8b) has where its hours are from). Before its rows are here the plan of
`{recipe}` takes every one at its full length, at a utilization of {utilization:g}: more tokens than there are, and a utilization that
unpacked batches, as those of the published runs, do not reach.

| stage | published GPU-hours | plan on `gpu8` |
|---|---|---|
{published}

`rlvr_ppo` cannot be held against its hours: the published run's command asks for 10,000,000 episodes and was stopped by hand, after how
many is not known to us, and the recipe has 100,000; seven of its GPUs trained while answers of the policy before were drawn.

## GPUs

| name | memory, GiB | peak, TFLOP/s (bf16, dense) | bandwidth, GB/s |
|---|---|---|---|"""
MODELS = """
## Models of the hub

Parameters are counted by formula, and are those that the publishers state. Models trained from one of these go by its shape where their
name says so (`-Instruct`, `-SFT`, `-DPO`, ...).

| model | parameters | layers | hidden | heads | key heads | MLP | vocabulary |
|---|---|---|---|---|---|---|---|"""


def page() -> str:
    """The whole page."""
    cpu = estimates.CPU_START_S
    head = HEAD.format(
        looked=amounts.LOOKED_AT, characters=amounts.CHARACTERS, turn=amounts.TURN, start=estimates.START_S,
        none=cpu["none"], torch=cpu["torch"], vllm=cpu["vllm"], both=cpu["deepspeed+vllm"], rows=estimates.ROWS_A_SECOND,
        share=100 * work.CPU_UTILIZATION, bound=100 * amounts.SHARE_OF_A_BOUND, slot=SLOT_BYTES / memory.GIB, threads=MOST_THREADS,
    )  # fmt: skip
    lines = [head]
    lines += [f"| {one.term} | {_cell(one.formula)} | {_cell(one.source)} |" for one in (*memory.FORMULAS, *work.FORMULAS)]
    lines.append(ASSUMED.format(cuda=_gib(memory.RUNTIME["cuda"]), cpu=_gib(memory.RUNTIME["cpu"]), overhead=_gib(memory.ENGINE_OVERHEAD)))
    lines.append(ERROR)
    lines += [f"| {r} | {z} | {d} | {t} | {p:.2f} GB | {m:.2f} GB | {p / m:.2f} |" for r, z, d, t, p, m in MEASURED]
    lines.append(CARRIES_OVER.format(jobs=JOBS, recipe=PUBLISHED, utilization=Machine().utilization, published=_published()))
    lines += [f"| `{name}` | {gpu.memory_gb:g} | {gpu.peak_tflops:g} | {gpu.bandwidth_gbs:g} |" for name, gpu in GPUS.items()]
    lines.append(MODELS)
    lines += [
        f"| {name} | {s.parameters:,} | {s.layers} | {s.hidden} | {s.heads} | {s.kv_heads} | {s.ffn} | {s.vocabulary} |"
        for name, s in KNOWN.items()
    ]
    families = ", ".join(f"`{name}`" for name in FAMILIES)
    return "\n".join([*lines, "", f"Architectures whose `config.json` is understood: {families}.", ""])


def _published() -> str:
    """A row for each stage of which it is known what it took; the plan is that of a project in which nothing has run."""
    graph = load_recipe(ROOT / "configs" / "recipes", PUBLISHED)
    assert graph.published is not None
    with TemporaryDirectory() as empty:
        estimates = Estimates(Project(Path(empty)), graph, load_execution(Project(ROOT), "gpu8"))
        nodes = {node.name: node for node in graph.nodes.values()}
        planned = {name: estimates.of(nodes[name]).gpu_hours for name in graph.published.hardware}
    return "\n".join(
        f"| `{name}` | {took.gpus * took.hours:g} ({took.gpus} GPUs, {took.hours:g} h) | {planned[name]:.0f} |"
        for name, took in graph.published.hardware.items()
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _gib(count: int) -> str:
    return f"{count / memory.GIB:g} GiB"
