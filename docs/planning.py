"""Generate docs/plan.md: the contents of a plan, its formulas, and its measured accuracy."""

from pathlib import Path
from tempfile import TemporaryDirectory

from pedigree.configs.base.project import Project
from pedigree.configs.base.work import SHARE_OF_A_BOUND
from pedigree.configs.language.execution import ENGINE_OVERHEAD, GPUS, MOST_THREADS, SLOT_BYTES, Machine
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.estimate import amounts, estimates, flops, peak_memory, search
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.estimate.shapes import FAMILIES, KNOWN
from pedigree.pipelines.run.opening import load_execution

ROOT = Path(__file__).resolve().parents[1]

HEAD = """# What a plan states

<!-- Written by `python -m docs.generate`; do not edit. -->

Before anything is downloaded or started, `pedigree plan RECIPE` states what each stage to run needs under the profile: memory per rank,
tokens, steps, time, GPU-hours, checkpoints and disk. If a stage needs more memory than the profile's machine has, the plan gives the
shortfall and the settings that would make it fit, each verified against the estimate; the exit code is then 1, and `pedigree run` refuses
the stage before any job starts. A stage restored from the cache (`cached`) runs no job: it takes no time and is not refused, unless the
cache turns out to be damaged, in which case it is refused just before its job would start. `--json` has every term in bytes.

A stage that cannot succeed is refused too, by one sentence per problem with its remedy (`problems` in the document; exit code 1): missing
files, files whose first rows cannot be read or do not fit the `form`, fewer rows or prompts than a stage takes, model files that do not
belong together, answers longer than the model's context, layers for `lora` that the model lacks, a `reference`, `teacher` or `value` with
other tokens, policies of different shapes to merge, models that vLLM cannot serve, answers and scores that nothing makes, `min_rows` that
no result can have.

- `plan` (exit code 1) refuses all of these for the stages to run, and what exceeds the memory.
- `run` and scheduled runs (2) refuse the same, and what only the machine knows: a GPU, disk for the models, servers and their keys, and the
  checkpoint store. `run` alone uses the network: it fetches the small files of [hub models](hub.md) first.
- `validate`, `rehearse`, `deploy` and `serve` (2) check all stages, but refuse neither what exceeds the memory nor files, folders and
  mirrors that are not on this machine, so that they work where no data are. `validate` names in a note what it could not check.

```console
$ pedigree plan demo --execution gpu8
$ pedigree plan demo --execution gpu8 --json
$ pedigree plan tulu3_8b --execution gpu8 --faster
```

**Faster settings.** `--faster` tries all combinations of ZeRO stage, recomputed layers, tokens per pass, GPUs per engine, and, if engines
generate while ranks train, GPUs of either side. For each stage that would gain more than {worth:.0%}, it prints the fastest ones that take
at most {room:.0%} of a GPU, as lines for the profile. Nodes, slots and the [identity](how-it-works.md#identity) of stages stay. Times are
the estimate plus what ranks exchange, as if nothing overlapped; *Plan and run* in the report shows how far such an estimate is from a
finished run.

**Machine.** [`machine`](profiles.md#machine) in the profile: `{{gpu: h100, gpus_per_node: 8, host_memory_gb: 1024}}`, or explicit numbers.
Without it, a GPU profile queries the local driver, and a CPU profile the kernel. If the machine remains unknown, the terms are stated and
nothing is refused. If a refusal is wrong for your machine, specify it there.

**Model.** The shape comes from the artifact of a sourced model, from `config.json` of a folder, from the recipe for a random model, and
from the hub's cache or the table below for a model of the hub. For any other model the plan reports an unknown shape, which is not an
error: it is known once its `source_model` stage has run.

**Tokens.** `~` is an estimate from the rows of finished stages, from the text of the first {looked} rows: one token per digit, one per
{characters:g} other characters, and {turn:g} per turn. `<` is an upper bound, from counts and lengths that the recipe allows. For data that
is not here yet, the recipe's `count` is used, otherwise the known row counts of common datasets and the `items` of a benchmark's form;
otherwise it is unknown.

**Time.** A stage that has run on such a machine is assumed to take the same time per token; any other stage runs at the speed of finished
stages of its kind in the recipe. Otherwise the estimate is operations at `utilization` of the peak and, for generation, bytes at
`bandwidth_utilization` of the bandwidth, plus startup: {start:g} s on GPUs; on a CPU {none:g} s without a model, {torch:g} s with torch,
{vllm:g} s with DeepSpeed or vLLM, {both:g} s with both. On a CPU, a stage without a model processes {rows:,.0f} rows a second. These are
assumptions; the profile can replace both utilizations. The time of downloads and servers is unknown. Times and GPU-hours are therefore `~`
even if the tokens are a bound. GPU-hours count every GPU that a stage holds. The time of the whole run accounts for stages that run in
parallel, as far as the profile's `slots` allow.

On a CPU the peak is measured: a separate process multiplies matrices for two seconds, once per machine, and stores the rates of a core in
`~/.cache/pedigree/product-rates` (`pedigree doctor` shows them; delete the file to measure again). It measures processor time, so other
work hardly affects it; the estimate assumes an otherwise idle machine. bf16 products are assumed to be as fast as fp32 products if they
are computed through fp32 (`bf16_products`). Without a `utilization` in the profile, {share:.0f} % of the peak is assumed: SFT of
SmolLM2-135M reached 53 % in bf16 on two cores of an AMD EPYC with bf16 units, and 95 %, by processor time, in fp32 on a Xeon without them;
vLLM sampling reached 43 % on the EPYC. The bandwidth is measured too, and all of it is assumed unless the profile sets
`bandwidth_utilization`. If only an upper bound on the tokens is known, {bound:.0f} % of it is assumed. `pedigree run` states the time
before it starts and shows the remaining time of the whole run; that estimate improves with each finished stage.

**CPU allocation.** With `auto`, as in the profile `cpu`, there is one slot per usable physical core (respecting affinity and cgroup
quotas, without hyper-threads), but at most one per {slot:g} GiB of memory. A compute stage uses as many threads as there are cores, at
most {threads} and at most the profile's numeric `slots`; its ranks or `engines` divide them. A stage that reads rows uses one thread. In
an SFT step of SmolLM2-135M in fp32 with 512 tokens, 6 % runs on a single thread; this was measured with two threads, which together used
as much processor time as one. By Amdahl's law, 2, 4, 8 and 16 threads are then 1.9, 3.4, 5.6 and 8.4 times as fast as one, ignoring
memory: two jobs on four cores each have 20 % more throughput than one on eight, but each takes 1.7 times as long. Because most stages of a
recipe wait for the previous one, up to eight cores a single job on all of them finishes sooner; with sixteen, two jobs on eight each have
34 % more throughput. The measurement is of two cores; the numbers for more are calculated.

**GPU nodes.** With `threads: auto`, as in `gpu` and `gpu8`, a stage has the share of the node's cores that its slots are of all slots, and
its ranks or engines divide it: on 104 cores, each of eight ranks has 13 threads, and so has a data stage on one of eight slots.

**Disk.** The size of the artifacts. A job moves its output into place, and DVC copies it into its cache (`.dvc/cache`), which takes the
same again: on ext4 an output of 5 MB takes 10 MB. Only file systems with reflinks (Btrfs, XFS) share the blocks. Without reflinks, twice
the stated disk must be free, plus checkpoints; a `cached` stage already has half of that.

After a run, the report's section *Plan and run* shows for each finished stage what would have been planned if it had never run, next to its
actual peak memory, tokens and seconds. `run.json` records the peak per attempt in bytes: `host` for the process of the first rank, `child`
for the largest process it started (vLLM), and on GPUs `gpu`, the memory allocated by torch.

## Formulas

Ψ parameters, Ψ_t trained parameters, R ranks, e bytes of the compute dtype, T tokens of one pass on each rank (divided by
`sequence_parallel`); L layers, H hidden width, A heads, K key heads, D head width, F MLP width, V vocabulary, N parameters multiplied per
token, s tokens of a document. The peak is the largest of loading, the sum of all terms of a step and, in `rlvr` on GPUs, `rollouts`. Terms
of a step are summed, although not all exist at the same time, so the result is an upper bound by a few percent.
"""
ASSUMED = """
`runtime` is the memory of a process before any tensor: {cuda} on a GPU, {cpu} of host memory on CPUs. This is an assumption, like the
{overhead} added for vLLM to weights and cache. Experts of a mixture count as far as a token passes through them; with tensor parallelism,
an engine's weights are divided evenly, and each rank has at least one key head.

Not included: fragmentation of the allocator, scores of soft caps and sinks where FlexAttention cannot be compiled
([training.md](training.md#which-attention-computes-what)), `sdpa` where it repeats key heads, the fp32 copies of operands on a CPU without
bf16 units (for the head, 4 bytes for each weight and each logit of a chunk), parallel stages on one GPU, reading data on the host, and the
network.
"""
ERROR = """## Accuracy

A training step of SmolLM2-135M on CPUs, two micro-batches a step, by torch's own accounting of all tensors (`planned / measured` for the
peak, with the whole bucket as torch counts it). `tests/stages/test_memory_estimates.py` checks a small model in the same way, to 25 %;
memory that persists between steps to 3 %, and activations of five architectures to 2 %.

| ranks | ZeRO | dtype | tokens per pass | planned | measured | planned / measured |
|---|---|---|---|---|---|---|"""
MEASURED: tuple[tuple[int, int, str, str, float, float], ...] = (
    (1, 1, "bf16", "2048", 4.443, 4.357),
    (1, 1, "bf16", "2048, layers recomputed", 2.914, 2.773),
    (1, 2, "bf16", "512", 4.614, 4.228),
    (1, 2, "fp32", "512", 5.781, 5.497),
    (1, 3, "bf16", "512", 5.614, 5.497),
    (2, 1, "bf16", "512", 2.269, 2.156),
    (2, 2, "bf16", "512", 3.538, 3.152),
    (2, 3, "bf16", "512", 4.672, 4.343),
)
"""Ranks, ZeRO stage, dtype, tokens per pass, planned and measured peak in GB."""
JOBS = """Whole jobs of `tiny` on CPUs, by the peak memory of their processes (`run.json`), planned and measured in GB:

| sft | reward_model | preference_train | rlvr | sample | judge | source_model |
|---|---|---|---|---|---|---|
| 0.84, 0.87 | 0.83, 0.66 | 0.84, 0.68 | 2.7, 2.6 | 1.9, 1.9 | 0.82, 0.58 | 0.81, 0.57 |

In these jobs, `runtime` and vLLM's process account for nearly all memory. With full-size models, the plan underestimates a process on a
CPU, because glibc retains freed memory: SFT of SmolLM2-135M in `demo` took at least 4.9 GB, planned 4.1 GB; without our allocator
settings, at 2048 tokens per pass, 6.3 GB against 4.4 GB of torch tensors. On a CPU, allow for this on top of the plan."""
PUBLISHED = "tulu3_8b"
"""The recipe whose `published.hardware` lists the GPU-hours of its stages."""
CARRIES_OVER = """
{jobs}

On GPUs, the states of a step (weights, gradients, optimizer, buckets) are the same tensors, counted exactly. Activations are those of the
same modules, except for attention, whose GPU kernel keeps no fp32 result; that term is derived, not measured. CUDA's own memory and
fragmentation, vLLM's overhead, `offload_optimizer`'s share on either side, all GPU times, and hence `utilization`, have not been measured.
Use the section *Plan and run* of your first run as the measurement, and set `machine` accordingly.

## Comparison with published runs

Tülu 3 8B was trained on H100s ([flagship.md](flagship.md#tulu3_8b) gives the source of the hours). Before its rows are here, the plan of
`{recipe}` assumes the full length for every row, and a utilization of {utilization:g}: more tokens than there are, and a utilization that
unpacked batches, like those of the published runs, do not reach.

| stage | published GPU-hours | plan on `gpu8` |
|---|---|---|
{published}

The hours of `rlvr_ppo` are not comparable: the published run's command requests 10,000,000 episodes and was stopped manually after an
unknown number, and the recipe has 100,000; seven of its GPUs trained while answers of the previous policy were sampled.

## GPUs

| name | memory, GiB | peak, TFLOP/s (bf16, dense) | bandwidth, GB/s | to another GPU, GB/s |
|---|---|---|---|---|"""
MODELS = """
## Models of the hub

Parameters are counted by formula and match the published numbers. Models trained from one of these are recognized by their name
(`-Instruct`, `-SFT`, `-DPO`, ...) and use its shape.

| model | parameters | layers | hidden | heads | key heads | MLP | vocabulary |
|---|---|---|---|---|---|---|---|"""


def page() -> str:
    """The page of plans."""
    cpu = estimates.CPU_START_S
    head = HEAD.format(
        looked=amounts.LOOKED_AT, characters=amounts.CHARACTERS, turn=amounts.TURN, start=estimates.START_S,
        none=cpu["none"], torch=cpu["torch"], vllm=cpu["vllm"], both=cpu["deepspeed+vllm"], rows=estimates.ROWS_A_SECOND,
        room=search.ROOM, worth=1 - search.WORTH,
        share=100 * flops.CPU_UTILIZATION, bound=100 * SHARE_OF_A_BOUND, slot=SLOT_BYTES / peak_memory.GIB, threads=MOST_THREADS,
    )  # fmt: skip
    lines = [head]
    lines.append((ROOT / "pipelines" / "estimate" / "formulas.md").read_text().rstrip())
    runtime = peak_memory.RUNTIME
    lines.append(ASSUMED.format(cuda=_gib(runtime["cuda"]), cpu=_gib(runtime["cpu"]), overhead=_gib(ENGINE_OVERHEAD)))
    lines.append(ERROR)
    lines += [f"| {r} | {z} | {d} | {t} | {p:.2f} GB | {m:.2f} GB | {p / m:.2f} |" for r, z, d, t, p, m in MEASURED]
    lines.append(CARRIES_OVER.format(jobs=JOBS, recipe=PUBLISHED, utilization=Machine().utilization, published=_published()))
    lines += [
        f"| `{name}` | {gpu.memory_gb:g} | {gpu.peak_tflops:g} | {gpu.bandwidth_gbs:g} | {gpu.link_gbs:g} |" for name, gpu in GPUS.items()
    ]
    lines.append(MODELS)
    lines += [
        f"| {name} | {s.parameters:,} | {s.layers} | {s.hidden} | {s.heads} | {s.kv_heads} | {s.ffn} | {s.vocabulary} |"
        for name, s in KNOWN.items()
    ]
    families = ", ".join(f"`{name}`" for name in FAMILIES)
    return "\n".join([*lines, "", f"Supported architectures in `config.json`: {families}.", ""])


def _published() -> str:
    """A row for each stage with published hours; the plan is that of a project in which nothing has run."""
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


def _gib(count: int) -> str:
    return f"{count / peak_memory.GIB:g} GiB"
