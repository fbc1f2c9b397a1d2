"""Generate docs/several-nodes.md: jobs whose ranks run on several machines, and the plan of a model with 70 B parameters on eight nodes."""

from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Execution, Machine
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.estimate.estimates import Estimate, Estimates
from pedigree.pipelines.estimate.peak_memory import total
from pedigree.stages.job.meeting import MEETING

RECIPE = """\
description: SFT and DPO of Llama 3.1 70B, with the batches and lengths of Tülu 3, and SFT on rows of 131,072 tokens
stages:
  base:
    kind: source_model
    source: {type: hub, repo: meta-llama/Llama-3.1-70B, revision: pin me, licence: llama3.1}
    dtype: bf16
  conversations:
    kind: prepare_data
    record: conversation
    sources: [{type: hub, repo: allenai/tulu-3-sft-mixture, split: train, revision: pin me, licence: odc-by}]
  pairs:
    kind: prepare_data
    record: preference
    sources:
      - {type: hub, repo: allenai/llama-3.1-tulu-3-70b-preference-mixture, split: train, revision: pin me, licence: odc-by, count: 330000}
  sft:
    kind: sft
    in: {policy: base, data: [conversations]}
    global_batch: 128
    epochs: 2
    max_length: 4096
    optimizer: {learning_rate: 2e-6}
  dpo:
    kind: preference_train
    in: {policy: sft, preferences: [pairs]}
    loss: {type: dpo_norm, beta: 5}
    global_batch: 128
    max_length: 2048
    optimizer: {learning_rate: 2e-7}
  long:
    kind: sft
    in: {policy: sft, data: [conversations]}
    global_batch: 16
    max_steps: 500
    max_length: 131072
    optimizer: {learning_rate: 2e-6}
"""
PROFILE = """\
slots: 8
machine: {gpu: h100, gpus_per_node: 8, host_memory_gb: 1024}
numerics: {device: cuda, zero_stage: 3, micro_batch_tokens: 16384, gradient_checkpointing: true, threads: 8}
kinds:
  sft: &eight_nodes {numerics: {world_size: 64, nodes: 8}, placement: {slots: 8, grace_s: 900}}
  preference_train: *eight_nodes
stages:
  long: {numerics: {world_size: 64, nodes: 8, sequence_parallel: 8, micro_batch_tokens: 131072}}
"""
HEAD = """# Several nodes

<!-- Written by `python -m docs.generate`; do not edit. -->

The ranks of a training stage can be divided among machines. `numerics.nodes` in the profile is their number, `world_size` the number of
all ranks, and `slots` what the stage occupies on each machine:

```yaml
{profile}```

Start the run on one machine, and `pedigree join` on each of the others, in the same project folder on a disk that all of them share, under
the same path, with the same installation:

```console
node-1$ pedigree run big --execution eight_nodes
node-2$ pedigree join
```

`join` waits for jobs of this project that lack nodes. It takes this machine's slots, runs its share of the ranks, and then waits for the
next job, until Ctrl-C. The job waits until all its nodes are there, and the run's display counts them. Other stages use the machine of
`pedigree run` alone. So do the engines of `rlvr`: the other nodes wait during its rollouts.

The name of the first machine (`hostname`) must resolve on the others, and its ports must be reachable. gloo and NCCL choose a network
interface; set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` where they choose another one.

**When a node is lost**, its job ends on the others within 30 seconds, and the run starts it again from its last checkpoint. The next
attempt waits for `pedigree join` on as many machines as before. To continue on fewer or more, stop the run, change `nodes` (and
`world_size`) and add [`--allow-numerics-change`](resume.md): reductions of GPUs may round otherwise, and the record states the change.
Ctrl-C in `pedigree join`, or SIGTERM, stops the whole job with a checkpoint.

**A slow node** makes the others wait; the [report](training.md#checks-during-a-job) names it.

**Who does what.** Rank 0, on the machine of `pedigree run`, writes progress, curve, evidence and the result, and runs engines and
verifiers. Every rank reads rows, weights and tokens from the shared folder, sends its own heartbeat, and writes its part of a checkpoint.
The log of another node is `log-HOSTNAME.txt` next to the job's `log.txt`; in Slurm, all nodes write to `log.txt`. `pedigree logs` shows
all of them.

**Schedulers.** With [Slurm](slurm.md), [Ray](ray.md) or [Kubernetes](kubernetes.md) a stage starts on all its nodes by itself.
`pedigree run` and `pedigree join` can also be started by any other scheduler. What both start on a node is

```console
$ python -m pedigree.stages.training.nodes SCRATCH lead   # on the node of rank 0
$ python -m pedigree.stages.training.nodes SCRATCH join   # on each of the others
```

with the scratch folder of the job, in the job's environment; a third argument of the lead is its host name, if `hostname` does not resolve
on the others. The lead writes `{meeting}` with its host and port into that folder, and the
others wait for the file. All run torchrun with a static rendezvous at that address.

## A model with 70 B parameters on eight nodes

The plan of this recipe under the profile above, 64 H100s, as `pedigree plan` computes it ([formulas](plan.md#formulas)):

```yaml
{recipe}```

| stage | memory of each GPU, of {gpu:.1f} GB | loading | tokens per pass | tokens | time | GPU-hours | checkpoints on disk |
|---|---|---|---|---|---|---|---|
{rows}

The largest terms, in GB per GPU:

| stage | {terms} |
|---|{dashes}
{parts}

In `long`, the eight ranks of a node [share each row](training.md#rows-that-ranks-share).

Assumptions: the tokens are upper bounds, with every row at full length; {utilization:g} of the peak of {peak:g} TFLOP/s, whatever the
network between the nodes. ZeRO-3 gathers the weights at most three times in each pass (forward, recomputed, backward) and reduces the
gradients once: {traffic:.0f} GB into each node's network and as much out of it, at 400 GB/s (eight adapters of 400 Gb/s) {transfer:.1f} s,
next to {compute:.1f} s of arithmetic. None of this has been measured on GPUs.
"""


def page() -> str:
    """The page of several nodes."""
    execution = Execution.model_validate(yaml.safe_load(PROFILE))
    with TemporaryDirectory() as empty:
        recipes = Path(empty) / "configs" / "recipes"
        recipes.mkdir(parents=True)
        (recipes / "big.yaml").write_text(RECIPE)
        graph = load_recipe(recipes, "big")
        estimates = Estimates(Project(Path(empty)), graph, execution)
        found = [estimates.of(node) for node in graph.nodes.values() if node.declaration.trains]
    assert all(one.needs and one.misfit is None for one in found), [str(one.misfit) for one in found]
    hardware = found[0].hardware
    assert hardware.gpu_bytes and hardware.peak and found[0].needs and found[0].facts
    names = list(dict.fromkeys(name for one in found if one.needs for name in one.needs.device))
    parameters, numerics = found[0].facts.policy.parameters, execution.of("sft", "sft")[0]
    # a node receives what its ranks do not hold, once per gathering (bf16), and sends as much; gradients are reduced in fp32
    moved = (3 * 2 + 4) * parameters * (1 - 1 / numerics.nodes)
    operations = 4 * 2 * parameters * found[0].needs.tokens_a_pass
    return HEAD.format(
        profile=PROFILE, recipe=RECIPE, meeting=MEETING, gpu=hardware.gpu_bytes / 1e9, rows="\n".join(map(_row, found)),
        terms=" | ".join(name.replace("_", " ") for name in names), dashes="---|" * len(names),
        parts="\n".join(f"| `{one.node.name}` | {' | '.join(_terms(one, names))} |" for one in found),
        utilization=Machine().utilization, peak=hardware.peak / 1e12, traffic=moved / 1e9, transfer=moved / 400e9,
        compute=operations / (hardware.peak * Machine().utilization),
    )  # fmt: skip


def _terms(estimate: Estimate, names: list[str]) -> list[str]:
    assert estimate.needs
    return [f"{estimate.needs.device[name] / 1e9:.1f}" if name in estimate.needs.device else "" for name in names]


def _row(estimate: Estimate) -> str:
    needs, time, tokens = estimate.needs, estimate.time, estimate.amounts.tokens
    assert needs and time and tokens and estimate.gpu_hours
    return (
        f"| `{estimate.node.name}` | {total(needs.device) / 1e9:.1f} GB | {total(needs.loading) / 1e9:.1f} GB | {needs.tokens_a_pass:,} | "
        f"{tokens.value / 1e9:.2f} · 10⁹ | {time.seconds / 3600:.0f} h | {estimate.gpu_hours:,.0f} | {estimate.scratch / 1e9:,.0f} GB |"
    )
