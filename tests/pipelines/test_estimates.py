"""What a stage needs, against numbers worked out by hand for Llama 3.1 8B; what does not fit is refused by name, with what would fit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pedigree.configs.base.project import Project
from pedigree.configs.base.work import Amount, Amounts, SamplingPlan
from pedigree.configs.judging.pools import PoolSampling, Sample, Window
from pedigree.configs.judging.scoring import Judge
from pedigree.configs.language.execution import Machine, Numerics, Placement, engines_problem
from pedigree.configs.language.kinds import kind_of
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.methods.optimizer import Optimizer
from pedigree.configs.methods.policy_gradient import Correction, Grpo, Keep, Ppo, Teacher
from pedigree.configs.methods.preference import Dpo, Kto
from pedigree.configs.methods.reward_terms import Reward
from pedigree.configs.methods.training import Asynchronous, Lora, PreferenceTrain, ReferenceLogprobs, Rlvr, Sampling, Sft
from pedigree.configs.rows.suite_forms import form_names, load_form
from pedigree.pipelines.estimate import flops, machines, peak_memory
from pedigree.pipelines.estimate.amounts import amounts_of, tokens_of
from pedigree.pipelines.estimate.estimates import START_S, Estimates, Seconds, operations
from pedigree.pipelines.estimate.fit import Trial, lacks, misfit
from pedigree.pipelines.estimate.machines import Hardware, gpu_named, hardware_of
from pedigree.pipelines.estimate.needs import Facts, needs_of, scored, trained_parameters
from pedigree.pipelines.estimate.peak_memory import GIB, Trained
from pedigree.pipelines.estimate.shapes import KNOWN, Shape
from pedigree.pipelines.run.opening import load_execution

LLAMA = KNOWN["meta-llama/Llama-3.1-8B"]
PARAMETERS = 8_030_261_248
OPTIMIZER = Optimizer(learning_rate=1e-5)
H100 = hardware_of("cuda", Machine(gpu="h100", host_memory_gb=1024))
ONE = Machine(gpu="h100", gpus_per_node=1, host_memory_gb=1024)


def on_gpus(**fields) -> Numerics:
    told = {"device": "cuda", "zero_stage": 3, "world_size": 8, "micro_batch_tokens": 16384, "gradient_checkpointing": True}
    return Numerics.model_validate(told | fields)


def sft(**fields) -> Sft:
    return Sft.model_validate({"global_batch": 128, "max_length": 4096, "optimizer": OPTIMIZER, **fields})


def dpo() -> PreferenceTrain:
    return PreferenceTrain(global_batch=128, max_length=2048, loss=Dpo(type="dpo"), optimizer=OPTIMIZER)


def rlvr(algorithm=None, answers: int = 16, prompts: int = 48, longest: int = 2048) -> Rlvr:
    sampling = Sampling(max_tokens=longest)
    return Rlvr(
        algorithm=algorithm or Grpo(type="grpo"), steps=10, prompts_per_step=prompts, samples_per_prompt=answers, sampling=sampling,
        max_prompt_length=2048, optimizer=OPTIMIZER,
    )  # fmt: skip


def facts(config, shape: Shape, judge: Shape | None = None, **fields) -> Facts:
    """Of a stage with this model, by the declaration of its kind."""
    kind = kind_of(config)
    sampling = kind.sampling_plan(config)
    plans = {"training": kind.training_plan(config), "scoring": kind.scoring_plan(config), "sampling": sampling}
    return Facts(shape, served=(judge or shape) if sampling else None, **plans, **fields)


def trial(config, numerics: Numerics, hardware: Hardware = H100, shape: Shape = LLAMA, **fields) -> Trial:
    placement = Placement.model_validate(fields.pop("placement", {}))
    return Trial(facts(config, shape, **fields), numerics, placement, hardware)


# --- memory, by hand ---------------------------------------------------------------------------------------------------


def test_states_of_llama_3_1_8b_over_eight_ranks_of_zero_3():
    model, numerics = Trained(LLAMA, "bf16", PARAMETERS), on_gpus()
    # bf16 weights: 2 Ψ / 8 = 2,007,565,312, and 10⁹ gathered elements of 2 bytes
    assert peak_memory.weights(model, numerics) == 2_007_565_312 + 2_000_000_000
    # fp32 gradients: 4 Ψ / 8 = 4,015,130,624; the embedding's as it comes: 2 · 128,256 · 4,096 = 1,050,673,152
    assert peak_memory.gradients(model, numerics) == 4_015_130_624 + 1_050_673_152
    # fp32 weights and two moments: 12 Ψ / 8
    assert peak_memory.optimizer(model, numerics) == 12_045_391_872
    # Rajbhandari et al., table 1, have 16 Ψ / N: their gradients are fp16, ours fp32, so it is 18 Ψ / N
    kept = 2_007_565_312 + 4_015_130_624 + 12_045_391_872
    assert kept == 18 * PARAMETERS // 8
    # a bucket of 5·10⁸ elements in fp32, and a flat copy of it
    assert peak_memory.buckets(model, numerics) == 4_000_000_000
    # ZeRO-2: two buckets in bf16 of the embedding's 525,336,576 elements, and a copy in fp32 of what is reduced
    assert peak_memory.buckets(model, on_gpus(zero_stage=2)) == 2 * 2 * 525_336_576 + 4 * 525_336_576


@pytest.mark.parametrize(
    ("zero", "ranks", "expected"),
    [  # weights 2 Ψ, gradients 4 Ψ, optimizer 12 Ψ, of which ranks share more with each stage; arXiv 1910.02054, figure 1 with K = 12
        (1, 1, (2.0, 4.0, 12.0)),
        (1, 8, (2.0, 4.0, 1.5)),
        (2, 8, (2.0, 0.5, 1.5)),
        (3, 8, (0.25, 0.5, 1.5)),
    ],
)
def test_what_ranks_share_of_each_state_in_bytes_per_parameter(zero, ranks, expected):
    model, numerics = Trained(LLAMA, "bf16", PARAMETERS), on_gpus(zero_stage=zero, world_size=ranks)
    gathered = 2_000_000_000 if zero == 3 else 0
    found = (
        peak_memory.weights(model, numerics) - gathered,
        peak_memory.gradients(model, numerics) - 1_050_673_152,
        peak_memory.optimizer(model, numerics),
    )
    assert [round(count / PARAMETERS, 6) for count in found] == list(expected)


def test_activations_of_a_layer_by_hand():
    # H 4096, A 32, K 8, D 128, F 14336, bf16 on a GPU. Two norms: 4 + (4 + 2 + 2) · 4096 = 32,772 each.
    # Attention: queries and result 2 · 2 · 4096, keys and values 2 · 2 · 1024, a sum of 4 bytes per head 128 = 20,608.
    # MLP: gate, its activation, up and their product 4 · 2 · 14336 = 114,688.
    assert peak_memory.layer_activations(LLAMA, on_gpus(), 2) == 2 * 32_772 + 20_608 + 114_688 == 200_840
    # once per pass: the last norm 8 · 4096, cosines and sines 2 · 2 · 128, ids and positions 24
    head = 32_768 + 512 + 24
    assert peak_memory.activations(LLAMA, on_gpus(gradient_checkpointing=False), 2, 1000) == 1000 * (32 * 200_840 + head)
    # checkpointed: of each layer its input, 2 · 4096, and one layer whole while it is gone through
    assert peak_memory.activations(LLAMA, on_gpus(), 2, 1000) == 1000 * (32 * 8192 + 200_840 + head)


def test_whole_scores_by_hand():
    """32 heads; 1000 tokens in documents of at most 400. The softmax in fp32 takes 4 bytes, its rounding 2, the tanh of a cap 2 or 4."""
    capped, padded = replace(LLAMA, softcap=True), {"attention": "eager", "packing": False}

    def found(shape: Shape, numerics: Numerics, **told) -> int:
        return peak_memory.score_matrices(shape, numerics, **{"size": 2, "tokens": 1000, "longest": 400} | told).get("score_matrices", 0)

    assert found(LLAMA, on_gpus()) == found(capped, on_gpus()) == found(LLAMA, Numerics()) == 0  # flash and flex attention
    assert found(capped, Numerics()) == 32 * 32 * 1000 * 400 * (4 + 4)  # of 32 layers
    assert found(capped, Numerics(), trained=False) == 32 * 1000 * 400 * (4 + 4)
    assert found(capped, Numerics(packing=False)) == 0  # sdpa
    assert found(LLAMA, on_gpus(**padded)) == 32 * 1000 * 400 * (4 + 2)  # the layer that is recomputed
    assert found(capped, on_gpus(**padded)) == 32 * 1000 * 400 * (4 + 2 + 2)
    assert found(capped, on_gpus(**padded), size=4) == 32 * 1000 * 400 * (4 + 4)
    assert found(LLAMA, on_gpus(attention="eager")) == 32 * 1000 * 1000 * (4 + 2)  # a row with a mask


def test_a_plan_has_the_scores_of_what_is_trained_and_of_what_only_scores():
    eager = on_gpus(world_size=1, attention="eager", packing=False, micro_batch_sequences=2)
    for config in (sft(), ReferenceLogprobs(max_length=4096)):
        assert needs_of(facts(config, LLAMA), eager, Placement()).device["score_matrices"] == 32 * 8192 * 4096 * 6
        assert "score_matrices" not in needs_of(facts(config, LLAMA), on_gpus(), Placement()).device
    ratings = facts(Judge(reward_weight=1, dtype="bf16"), LLAMA)  # documents of any length: a whole pass
    packed = needs_of(ratings, eager.model_copy(update={"packing": True}), Placement())
    assert packed.device["score_matrices"] == 32 * 16384 * 16384 * 6
    assert "| score_matrices |" in Path(peak_memory.__file__).with_name("formulas.md").read_text()


def test_a_reference_that_is_the_policy_before_training_takes_nothing_with_adapters():
    def reference(lora: Lora | None, **fields) -> int | None:
        config = dpo().model_copy(update={"lora": lora})
        return needs_of(facts(config, LLAMA, reference=LLAMA, **fields), on_gpus(), Placement()).device.get("reference")

    assert reference(None, reference_is_policy=True) == reference(Lora(), reference_is_policy=False) == 2 * PARAMETERS // 8
    assert reference(Lora(), reference_is_policy=True) is None


def test_logits_never_meet_the_whole_batch():
    # chunks of 1024 tokens: 128,256 · (2 · 2 · 1024 + 12 · 1024)
    assert peak_memory.logits(LLAMA, on_gpus(), 2, 16384) == 128_256 * 16 * 1024
    assert peak_memory.logits(LLAMA, on_gpus(logprob_chunk=256), 2, 16384) == 128_256 * 16 * 256


def test_an_fp32_head_keeps_wide_logits_and_sums_its_gradient_in_fp32():
    # logits and their gradient 2 · 4 · 1024; weights of 4096: a sum and a chunk's gradient of 4 bytes each, of which 2 are counted already
    assert peak_memory.logits(LLAMA, on_gpus(), 2, 16384, "fp32", True) == 128_256 * (20 * 1024 + 6 * 4096)
    assert peak_memory.logits(LLAMA, on_gpus(), 2, 16384, "model", True) == 128_256 * (16 * 1024 + 4 * 4096)
    assert peak_memory.logits(LLAMA, on_gpus(), 2, 1024, "model", True) == 128_256 * 16 * 1024  # one chunk: nothing to sum
    # frozen, a GPU needs no copy of the weights; blocks of a CPU are of 128 rows
    assert peak_memory.logits(LLAMA, on_gpus(), 2, 16384, "fp32") == 128_256 * 20 * 1024
    assert peak_memory.logits(LLAMA, Numerics(), 2, 16384, "fp32") == 128_256 * (8 * 1024 + 12 * 128 + 4 * 4096)


def test_the_cache_of_a_chunk_of_requests():
    # 2 · 32 layers · 8 key heads · 128 · 2 bytes = 131,072 per token; 64 requests of 1000 tokens in blocks of 16, and one block
    assert peak_memory.kv_bytes_per_token(LLAMA, 2) == 131_072
    assert peak_memory.kv_cache(LLAMA, 2, 64, 1000) == (64 * 63 + 1) * 16 * 131_072
    # eight key heads over 16 ranks: each has one
    assert peak_memory.kv_bytes_per_token(LLAMA, 2, 16) == 131_072 // 8


def test_adapters_and_scalar_heads():
    # rank 16 on q, o (4096 + 4096), k, v (4096 + 1024), gate, up, down (4096 + 14336), 32 layers: as peft counts, 41,943,040
    assert trained_parameters(LLAMA, Lora(rank=16).adapters, scores=False) == 41_943_040
    assert scored(LLAMA).parameters == PARAMETERS - 128_256 * 4096 + 4096
    model, numerics = Trained(LLAMA, "bf16", 41_943_040), on_gpus(zero_stage=1, world_size=1)
    assert peak_memory.optimizer(model, numerics) == 12 * 41_943_040 and peak_memory.weights(model, numerics) == 2 * (PARAMETERS)


def test_operations_and_time_by_hand():
    # N = Ψ without the input embedding: 8,030,261,248 - 525,336,576. Attention of 4096 tokens: 2 · 32 · 4096 · 4096.
    assert LLAMA.multiplied == 7_504_924_672
    forward = 2 * 7_504_924_672 + 1_073_741_824
    assert flops.forward(LLAMA, 4096) == forward
    assert flops.training(LLAMA, 4096, checkpointing=False) == 3 * forward
    assert flops.training(LLAMA, 4096, checkpointing=True) == 4 * forward
    assert flops.training(LLAMA, 4096, checkpointing=True, adapters=True) == 3 * forward
    # 10¹⁸ operations on eight GPUs of 10¹⁵ a second, a quarter of it reached
    assert flops.seconds(1e18, 8, 1e15, 0.25) == 500


def test_a_token_of_every_request_reads_the_weights_and_its_cache():
    # 64 requests at once, 100 tokens each: 100 · (2 · 7,504,924,672 + 64 · (0 + 50) · 131,072) bytes at 10¹² a second
    told = {"requests": 64, "together": 64, "prompt": 0, "computed": 0, "answer": 100, "size": 2, "ranks": 1}
    told |= {"peak": 1e15, "utilization": 0.5}
    expected = 100 * (15_009_849_344 + 64 * 50 * 131_072) / 1e12
    assert flops.generation(LLAMA, **told, bandwidth=1e12) == pytest.approx(expected)
    assert flops.generation(LLAMA, **told | {"requests": 640}, bandwidth=1e12) == pytest.approx(10 * expected)


@pytest.mark.parametrize(
    ("requests", "together", "chunks"),
    [(40, 256, 1), (256, 256, 1), (257, 256, 2), (600, 512, 3), (65, 64, 2), (0.5, 64, 1)],
)
def test_the_weights_are_read_for_every_token_however_few_requests_wait_for_it(requests, together, chunks):
    """2048 tokens on one H100 with half of its bandwidth: reading 15 GB so often takes 18.4 s."""
    told = {"prompt": 0, "computed": 0, "answer": 2048, "size": 2, "ranks": 1, "peak": 1e15, "utilization": 0.5, "bandwidth": 3350e9 / 2}
    cache = 2048 * requests * 1024 * 131_072 / told["bandwidth"]
    found = flops.generation(LLAMA, requests=requests, together=together, **told)
    assert found == pytest.approx(chunks * 2048 * 15_009_849_344 / told["bandwidth"] + cache)
    assert found > 18.3


@pytest.mark.parametrize(
    ("prompt", "samples", "block", "tokens"),
    [
        (19, 8, 16, 5.0),  # 19 of the first answer, and 3 of each of seven others
        (19, 8, 128, 19.0),
        (19, 1, 16, 19.0),
        (32, 2, 16, 24.0),  # the last token is computed, and its block with it
        (33, 2, 16, 17.0),
    ],
)
def test_of_a_prompt_that_answers_share_the_last_block_is_computed_for_each(prompt, samples, block, tokens):
    assert flops.unshared(prompt, samples, block) == tokens


@pytest.mark.parametrize("algorithm", [Grpo(type="grpo"), Ppo(type="ppo")])
def test_every_formula_of_the_docs_names_a_term(algorithm):
    terms = {row.split(" | ")[0].removeprefix("| ") for row in Path(peak_memory.__file__).with_name("formulas.md").read_text().splitlines()}
    critic = LLAMA if isinstance(algorithm, Ppo) else None
    model = needs_of(facts(rlvr(algorithm), LLAMA, reference=LLAMA, value=critic), on_gpus(), Placement(), H100.gpu_bytes)
    assert set(model.device) - {"runtime"} <= terms
    assert ("value_model" in model.device) == isinstance(algorithm, Ppo)


@pytest.mark.parametrize(
    ("document", "fields", "tokens"),
    [
        (None, {"micro_batch_tokens": 16384}, 16384),
        (None, {"micro_batch_tokens": 1024}, 4096),  # one that is longer than a pass goes alone, whole
        (500.0, {"micro_batch_tokens": 1024}, 2000),  # four times the mean, as of what is trained on
        (None, {"packing": False, "attention": "sdpa", "micro_batch_sequences": 8}, 8 * 4096),
        (500.0, {"packing": False, "attention": "sdpa", "micro_batch_sequences": 8}, 8 * 2000),
    ],
)
def test_a_pass_of_a_frozen_model_has_its_longest_document(document, fields, tokens):
    numerics = on_gpus(world_size=1, **fields)
    found = needs_of(facts(ReferenceLogprobs(max_length=4096), LLAMA, document=document), numerics, Placement())
    assert found.tokens_a_pass == tokens and found.device["working"] == peak_memory.working(LLAMA, 2, tokens)
    judged = needs_of(facts(Judge(reward_weight=1, dtype="bf16"), LLAMA, document=document), numerics, Placement())
    assert judged.tokens_a_pass == (tokens if document else numerics.micro_batch_tokens)


# --- what fits ---------------------------------------------------------------------------------------------------------


def test_a_refusal_says_what_by_how_much_and_what_would_fit():
    one = hardware_of("cuda", ONE)
    found = misfit(trial(sft(), on_gpus(world_size=1, zero_stage=1), one))
    assert found is not None
    (lack,) = found.lacks
    needs = needs_of(facts(sft(), LLAMA), on_gpus(world_size=1, zero_stage=1), Placement(), one.gpu_bytes)
    assert (lack.needed, lack.bound) == (needs.peak, int(79.6 * GIB)) and lack.largest[0] == ("optimizer", 12 * PARAMETERS)
    assert found.remedies == ("set numerics.offload_optimizer: true", "train adapters instead: `lora: {rank: 16}` in the recipe")
    told = r"each GPU needs 1\d\d\.\d GB \(optimizer 96\.4 GB, gradients 33\.2 GB, .*\) but has 85\.5 GB, \d\d\.\d GB too little: set "
    assert re.match(told, str(found))


@pytest.mark.parametrize(
    ("config", "fields", "remedy", "changed"),
    [
        (sft(), {"zero_stage": 1, "micro_batch_tokens": 40960}, "set numerics.zero_stage: 2", {"zero_stage": 2}),
        (sft(), {"gradient_checkpointing": False}, "set numerics.gradient_checkpointing: true", {"gradient_checkpointing": True}),
        (sft(), {"gradient_checkpointing": False}, "set numerics.micro_batch_tokens: 8192", {"micro_batch_tokens": 8192}),
        (sft(), {"zero_stage": 1, "world_size": 1}, "set numerics.offload_optimizer: true", {"offload_optimizer": True}),
        (rlvr(), {}, "set numerics.tensor_parallel: 4", {"tensor_parallel": 4}),
    ],
)
def test_a_remedy_that_is_named_makes_it_fit(config, fields, remedy, changed):
    placement = {"gpu_memory_utilization": 0.3, "slots": 8} if isinstance(config, Rlvr) else {}
    given = trial(config, on_gpus(**fields), placement=placement)
    found = misfit(given)
    assert found is not None and remedy in found.remedies
    assert not lacks(replace(given, numerics=on_gpus(**fields | changed)))


def test_a_policy_that_is_trained_has_as_many_engines_as_the_profile_says():
    found = misfit(trial(rlvr(), on_gpus(), placement={"gpu_memory_utilization": 0.3, "engines": 2, "slots": 8}))
    assert found is not None and "set numerics.tensor_parallel: 4" in found.remedies
    found = misfit(trial(rlvr(), on_gpus(), placement={"gpu_memory_utilization": 0.3, "engines": 2, "slots": 4}))
    assert found is not None and "set numerics.tensor_parallel: 4 and placement.slots: 8" in found.remedies
    cpu = Numerics(threads=1)
    one, two = (needs_of(facts(rlvr(), LLAMA, reference=LLAMA), cpu, Placement(engines=engines)) for engines in (1, 2))
    assert two.device["sampler"] == 2 * one.device["sampler"]


def with_reward_models(**fields) -> Rlvr:
    return rlvr().model_copy(update={"reward": Reward.model_validate({"terms": [{"type": "reward_model", **fields}]})})


def test_reward_models_have_gpu_memory_one_after_the_other_while_rollouts_are_generated():
    """A copy for each engine, in a process of its own; between rollouts only their CUDA contexts take memory."""
    given = {"rewarding": LLAMA, "rewarding_models": 2}
    two, without = (facts(config, LLAMA, **more) for config, more in ((with_reward_models(), given), (rlvr(), {})))
    needs, before = (needs_of(one, on_gpus(), Placement(engines=8, slots=8), H100.gpu_bytes) for one in (two, without))
    # without the vocabulary head, with one output: 8,030,261,248 - 525,336,576 + 4,096; a pass of 16,384 tokens in bf16
    weights, working = 2 * 7_504_928_768, 16_384 * 2 * (3 * 14_336 + 2 * 4_096)
    assert needs.rollouts == before.rollouts | {"reward_models": weights + working + 2 * GIB}
    assert needs.device == before.device | {"reward_models": 2 * GIB} and needs.loading == before.loading | {"reward_models": 2 * GIB}
    assert needs.asleep == before.asleep  # pages of their files
    alone = needs_of(two, on_gpus(world_size=1), Placement(), H100.gpu_bytes)
    assert alone.rollouts["reward_models"] == weights + working and "reward_models" not in alone.device
    wide = needs_of(replace(two, scoring=replace(two.scoring, dtype="fp32")), on_gpus(), Placement(engines=8, slots=8), H100.gpu_bytes)
    assert wide.asleep - before.asleep == 2 * 8 * 4 * PARAMETERS
    found = misfit(Trial(two, on_gpus(), Placement(engines=8, slots=8), H100))
    assert found is not None and ("reward_models", weights + working + 2 * GIB) in found.lacks[0].largest
    assert "set placement.gpu_memory_utilization: 0.3" in found.remedies[0]


def test_reward_models_on_a_cpu_stay_in_its_memory():
    given = {"rewarding": LLAMA, "rewarding_models": 2}
    needs = needs_of(facts(with_reward_models(dtype="fp32"), LLAMA, **given), Numerics(world_size=2), Placement())
    # one pass has the longest row, 2,048 + 2,048 tokens
    assert needs.device["reward_models"] == 2 * 4 * 7_504_928_768 + 4096 * 4 * (3 * 14_336 + 2 * 4_096)
    once = needs.device["sampler"] + needs.device["reward_models"]
    assert needs.together == 2 * (sum(needs.device.values()) - once) + once


def test_rollouts_whose_cache_never_fits_in_chunks_queue_if_they_are_recorded():
    """256 answers of 16k tokens at a time are too many for eight GPUs of 80 GB at any setting; queued ones need room for one answer."""
    config, placement = rlvr(longest=16_384), {"slots": 8, "gpu_memory_utilization": 0.3}
    found = misfit(trial(config, on_gpus(), placement=placement))
    assert found is not None and found.remedies == ("set replay: recorded in the recipe",)
    assert misfit(trial(config.model_copy(update={"replay": "recorded"}), on_gpus(), placement=placement)) is None


def test_a_teacher_is_held_and_computes_every_kept_answer_once_after_the_old_policy():
    """Next to the reference; 8 of 16 answers to each of 48 prompts make a step."""
    config = rlvr(Grpo(type="grpo", teacher=Teacher(), keep=Keep(answers=8)))
    given = facts(config, LLAMA, reference=LLAMA, teacher=LLAMA)
    assert given.training is not None
    assert (given.training.batch, given.training.teacher, given.training.looks) == (48 * 8, True, 1)
    device = needs_of(given, on_gpus(), Placement()).device
    assert device["teacher"] == device["reference"] == 2 * PARAMETERS // 8
    amounts = Amounts(document=Amount(1000, "counted"), tokens=Amount(1, "counted"))
    alone, taught = (operations(amounts, replace(given, teacher=teacher), checkpointing=False) for teacher in (None, LLAMA))
    assert taught - alone == flops.forward(LLAMA, 1000)


def test_what_cannot_be_refused_because_nobody_knows_the_gpu():
    unknown = Hardware("cuda")
    given = trial(sft(), on_gpus(world_size=1, zero_stage=1), unknown)
    assert misfit(given) is None and given.needs.peak > 100e9


def test_several_settings_together_where_none_alone_would_do():
    config = rlvr(Ppo(type="ppo"), answers=1, prompts=224)
    given = trial(
        config, on_gpus(micro_batch_tokens=65536), reference=LLAMA, value=LLAMA, placement={"gpu_memory_utilization": 0.3, "slots": 8}
    )
    found = misfit(given)
    assert found is not None and len(found.lacks) == 2
    (remedy,) = found.remedies
    fields = {name: json.loads(value) for name, value in re.findall(r"set numerics\.(\w+): (\w+)", remedy)}
    assert len(fields) >= 2 and not lacks(replace(given, numerics=on_gpus(**fields)))


def test_ppo_at_8b_takes_turns_with_its_sampler_on_eight_gpus_of_80_gb():
    """By hand, in bytes a rank: between steps a model has 2 Ψ / 8 of weights, 4 Ψ / 8 of gradients, 12 Ψ / 8 of optimizer and a bucket of
    4 · 5·10⁸; the value model has one column in place of 128,256 · 4,096 of the head."""
    config, numerics = rlvr(Ppo(type="ppo"), answers=1, prompts=224), on_gpus(tensor_parallel=8, micro_batch_tokens=8192)
    given = trial(config, numerics, reference=LLAMA, value=LLAMA, placement={"gpu_memory_utilization": 0.25, "slots": 8})
    needs, share = given.needs, int(0.25 * int(79.6 * GIB))
    policy = {"weights": 2_007_565_312, "gradients": 4_015_130_624, "optimizer": 12_045_391_872, "buckets": 2_000_000_000}
    valued = 18 * (PARAMETERS - 128_256 * 4_096 + 4_096) // 8 + 2_000_000_000
    assert needs.rollouts.pop("value_model") == pytest.approx(valued, abs=10)
    assert needs.rollouts == policy | {"reference": 2 * PARAMETERS // 8, "sampler": share, "runtime": GIB}
    # while it trains, vLLM keeps 2 GiB of the GPU, and on the host its weights
    assert needs.device["sampler"] == needs.loading["sampler"] == 2 * GIB and needs.asleep == 2 * PARAMETERS
    assert needs.host_of(8) == 2 * PARAMETERS
    assert misfit(given) is None
    crowded = misfit(replace(given, placement=given.placement.model_copy(update={"gpu_memory_utilization": 0.75})))
    assert crowded is not None and str(crowded).startswith("generating rollouts on the GPU of rank 0 needs ")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nothing_between_steps_is_more_than_in_a_step(zero):
    model, numerics = Trained(LLAMA, "bf16", PARAMETERS), on_gpus(zero_stage=zero)
    states = peak_memory.training(model, numerics, 1)
    assert all(bytes_ <= states[name] for name, bytes_ in peak_memory.at_rest(model, numerics).items())


def test_a_sampler_has_room_for_adapters_of_the_next_rank_that_it_serves():
    lora = rlvr().model_copy(update={"lora": Lora(rank=9)})
    engine, whole = (needs_of(facts(config, LLAMA), on_gpus(), Placement(), H100.gpu_bytes).engine for config in (lora, rlvr()))
    assert engine is not None and whole is not None and engine.weights - whole.weights == 2 * LLAMA.adapters(16)


@pytest.mark.parametrize(("loss", "can"), [(Dpo(type="dpo"), True), (Kto(type="kto"), False)])
def test_a_frozen_reference_can_be_a_stage_of_its_own_but_not_that_of_kto(loss, can):
    """Whose KL is of mismatched prompts and answers."""
    config = dpo().model_copy(update={"loss": loss})
    alone = needs_of(facts(config, LLAMA), on_gpus(), Placement()).peak
    found = misfit(trial(config, on_gpus(), Hardware("cuda", gpu_bytes=alone + GIB), reference=LLAMA))
    assert found is not None and found.remedies and any("reference_logprobs" in remedy for remedy in found.remedies) == can


def test_a_chunk_of_requests_must_fit_into_the_cache():
    sampling = PoolSampling(max_tokens=4096)
    config = Sample(sampling=sampling, samples_per_prompt=4, prompts=Window(count=1000), chunk_size=512)
    found = misfit(trial(config, on_gpus(world_size=1)))
    assert found is not None and "KV cache" in str(found)
    chunk = next(int(match[1]) for said in found.remedies if (match := re.search(r"chunk_size: (\d+)", said)))
    changed = config.model_copy(update={"chunk_size": chunk})
    assert chunk < 512 and misfit(trial(changed, on_gpus(world_size=1))) is None
    assert misfit(trial(config, on_gpus(world_size=1), requests=16.0)) is None  # there are no more


def test_requests_that_queue_need_the_cache_of_one():
    config = Sample(sampling=PoolSampling(max_tokens=4096), samples_per_prompt=4, prompts=Window(count=1000), chunk_size="continuous")
    given = trial(config, on_gpus(world_size=1))
    # a prompt of one token and its answer: 257 blocks of 16 tokens, and vLLM's own
    assert misfit(given) is None and given.needs.engine is not None and given.needs.engine.least_cache == 258 * 16 * 131_072
    small = misfit(trial(config, on_gpus(world_size=1), placement={"gpu_memory_utilization": 0.21}))
    assert small is not None and "KV cache" in str(small) and "chunk_size" not in str(small)


def test_engines_side_by_side_take_their_gpus_and_share_out_the_time(root, tmp_path):
    project = Project(root)
    graph, execution = load_recipe(project.recipes, "tulu3_8b_onpolicy"), load_execution(project, "gpu8")
    node = next(node for node in graph.nodes.values() if node.name == "sampled")
    estimates = Estimates(project, graph, execution)
    numerics, placement = execution.of(node.kind, node.name)
    one, four = (estimates.under(node, numerics, placement.model_copy(update={"engines": count, "slots": count})) for count in (1, 4))
    assert (one.gpus, four.gpus) == (1, 4) and one.needs is not None and four.needs is not None
    assert four.needs.peak == one.needs.peak and four.needs.engine == one.needs.engine
    assert one.time is not None and four.time is not None
    assert (four.time.seconds - START_S) * 4 == pytest.approx(one.time.seconds - START_S, rel=0.01)


def test_asynchronous_engines_take_gpus_beside_the_ranks_and_the_slower_side_decides_the_time():
    grpo = Grpo(type="grpo", correction=Correction())
    split = rlvr(grpo).model_copy(update={"replay": "recorded", "asynchronous": Asynchronous()})
    four, placement = on_gpus(world_size=4), Placement(engines=4, slots=8)
    turns, beside = (needs_of(facts(config, LLAMA, reference=LLAMA), four, placement, H100.gpu_bytes) for config in (rlvr(grpo), split))
    assert (turns.gpus, beside.gpus) == (4, 8)
    assert "sampler" in turns.device and "sampler" not in {**beside.device, **beside.loading}
    assert beside.rollouts.keys().isdisjoint(("states", "reference")) and turns.asleep > 0 == beside.asleep
    seconds = Seconds(30.0, 20.0, beside=True)
    assert seconds.total == 30 and seconds.busy == "; trainer busy 67%, engines 100%"
    assert Seconds(30.0, 20.0, beside=False).busy == "; trainer busy 40%, engines 60%" and not Seconds(30.0, 0.0, beside=False).busy
    assert engines_problem(four, placement, beside=True) is None
    said = "4 ranks of the trainer and engines 5 with tensor_parallel 1 need 9 slots, but placement.slots is 8: lower world_size or engines"
    assert said in (engines_problem(four, Placement(engines=5, slots=8), beside=True) or "")
    assert engines_problem(Numerics(), Placement(), beside=True) is None  # on a CPU they share cores
    two_nodes = four.model_copy(update={"world_size": 8, "nodes": 2})
    assert engines_problem(two_nodes, placement, beside=True) is None  # each node has four of the ranks


def test_policies_that_are_queried_take_gpus_of_their_own_and_on_a_cpu_memory_beside_the_rest():
    plan = SamplingPlan("user", "bf16", 256, 128, chunk=1)
    alone = facts(rlvr(Grpo(type="grpo")), LLAMA, reference=LLAMA)
    both = replace(alone, queried=((plan, replace(LLAMA, context=131072)),))
    four, placement = on_gpus(world_size=4), Placement(engines=4, slots=8)
    before, after = (needs_of(one, four, placement, H100.gpu_bytes) for one in (alone, both))
    assert (before.gpus, after.gpus) == (4, 5) and after.device == before.device
    assert after.queried["user"].cache == (131072 + 16) * 131072  # tokens of its context and a block, bytes of each
    cpu, small = Numerics(world_size=2), Placement(sampler_memory_gb=1.0)
    before, after = (needs_of(one, cpu, small) for one in (alone, both))
    weights = (after.together - before.together - GIB) / LLAMA.parameters
    assert 2 <= weights < 5 and after.device["user"] == after.together - before.together  # once, not for each rank
    found = lacks(Trial(both, cpu, small, Hardware("cpu", host_bytes=64 * GIB)))
    (lack,) = (lack for lack in found if "the context of the user" in lack.resource)
    assert lack.needed > lack.bound


def test_rows_of_131072_tokens_fit_where_ranks_share_them():
    """Of the 8B model: a row's checkpointed activations are 32 · 2 · 4096 bytes a token, 34 GB, and those of one layer more."""
    config, alone = sft(max_length=131072, global_batch=8), on_gpus(micro_batch_tokens=131072)
    found = misfit(trial(config, alone, H100))
    assert found is not None and "set numerics.sequence_parallel: 2" in found.remedies
    shared = alone.model_copy(update={"sequence_parallel": 4})
    whole, part = (needs_of(facts(config, LLAMA), numerics, Placement()) for numerics in (alone, shared))
    assert (whole.tokens_a_pass, part.tokens_a_pass) == (131072, 32768)
    assert 4 * part.device["activations"] == whole.device["activations"] and part.device["optimizer"] == whole.device["optimizer"]


def test_the_host_must_hold_what_every_rank_reads():
    # eight ranks read 4 Ψ each and round them to 2 Ψ: 385 GB; stored in bf16 they are pages that the ranks share
    small = Hardware("cuda", gpu_bytes=80 * GIB, gpus_per_node=8, host_bytes=200 * GIB)
    found = misfit(trial(sft(), on_gpus(), small, finer=True))
    assert found is not None and found.lacks[0].resource == "host memory of a node" and found.lacks[0].needed == 8 * 6 * PARAMETERS
    assert misfit(trial(sft(), on_gpus(), small)) is None


def test_a_model_that_no_gpu_can_hold_whole_is_trained_on_many():
    # over 64 ranks 18 Ψ / 64 is 20 GB, and parameters arrive one by one: 2 Ψ / 64 = 2.2 GB, and the embedding 2 · 128,256 · 8,192 = 2.1 GB
    many, shape = Hardware("cuda", gpu_bytes=80 * GIB), KNOWN["meta-llama/Llama-3.1-70B"]
    numerics = on_gpus(world_size=64)
    assert misfit(trial(sft(), numerics, many, shape)) is None
    loading = peak_memory.loading(Trained(shape, "bf16", shape.parameters), numerics)
    assert loading == 2 * -(-shape.parameters // 64) + 2 * 128_256 * 8_192
    dpo_needs = needs_of(facts(dpo(), shape, reference=shape), numerics, Placement())
    assert dpo_needs.device["reference"] == 2 * -(-shape.parameters // 64)


def test_ranks_on_a_cpu_share_its_memory():
    cpu = Hardware("cpu", gpus_per_node=1, host_bytes=8 * GIB)
    shape = KNOWN["HuggingFaceTB/SmolLM2-135M"]
    numerics = Numerics(world_size=2, micro_batch_tokens=4096)
    assert (
        needs_of(facts(sft(), shape), numerics.model_copy(update={"nodes": 2}), Placement()).together * 2
        == needs_of(facts(sft(), shape), numerics, Placement()).together
    )
    found = misfit(trial(sft(), numerics, cpu, shape=shape))
    assert found is not None and found.lacks[0].resource == "memory of 2 ranks"
    assert misfit(trial(sft(), Numerics(), replace(cpu, host_bytes=16 * GIB), shape=shape)) is None


def test_only_the_first_rank_of_a_cpu_has_the_sampler():
    shape = KNOWN["HuggingFaceTB/SmolLM2-135M"]
    config = rlvr(answers=2, prompts=2, longest=64)
    needs = needs_of(facts(config, shape), Numerics(world_size=4), Placement())
    sampler = needs.device["sampler"]
    exactly = 4 * (needs.peak - sampler) + sampler
    cpu = Hardware("cpu", gpus_per_node=1, host_bytes=exactly)
    assert misfit(trial(config, Numerics(world_size=4), cpu, shape=shape)) is None
    found = lacks(trial(config, Numerics(world_size=4), replace(cpu, host_bytes=exactly - 1), shape=shape))
    assert [lack.needed for lack in found] == [exactly]


JUDGED = {"verifier_weight": 0, "rating_weight": 1, "rating": {"rubrics": ["helpfulness"], "by": {"type": "policy", "chunk_size": 512}}}


def test_a_judge_that_does_not_fit_is_told_what_would():
    """It fits a GPU of an engine of several; the heads that must divide are its own, not those of what it judges."""
    config, judge = Judge.model_validate(JUDGED), KNOWN["meta-llama/Llama-3.1-70B"]
    odd = replace(KNOWN["HuggingFaceTB/SmolLM2-135M"], heads=9)
    given = trial(config, on_gpus(world_size=1), shape=odd, judge=judge)
    found = misfit(given)
    assert found is not None and "set numerics.tensor_parallel: 4 and placement.slots: 4" in found.remedies
    assert not lacks(replace(given, numerics=on_gpus(world_size=1, tensor_parallel=4)))


def test_a_judge_can_be_asked_in_smaller_chunks():
    sampling = {"sampling": {"temperature": 0.0, "max_tokens": 4096}}
    config = Judge.model_validate(JUDGED | {"rating": JUDGED["rating"] | sampling})
    given = trial(config, on_gpus(world_size=1), judge=LLAMA)
    found = misfit(given)
    assert found is not None
    chunk = next(int(match[1]) for said in found.remedies if (match := re.search(r"rating\.by\.chunk_size: (\d+)", said)))
    by = JUDGED["rating"]["by"] | {"chunk_size": chunk}
    changed = Judge.model_validate(JUDGED | {"rating": JUDGED["rating"] | sampling | {"by": by}})
    assert chunk < 512 and not lacks(trial(changed, on_gpus(world_size=1), judge=LLAMA))


BOTH = Judge.model_validate(JUDGED | {"reward_weight": 1})
SMALL = KNOWN["HuggingFaceTB/SmolLM2-135M"]


def test_a_reward_model_is_read_by_as_many_processes_as_engines_rate_after_it():
    # each reads 4 Ψ = 32.1 GB of the host
    for engines in (1, 8):
        hardware = replace(H100, host_bytes=engines * 32 * GIB)
        given = trial(BOTH, on_gpus(), hardware, judge=SMALL, placement={"engines": engines, "slots": engines})
        assert misfit(given) is None and given.needs.gpus == engines
        short = replace(given, hardware=replace(hardware, host_bytes=engines * 16 * GIB))
        (lack,) = lacks(short)
        assert (lack.resource, lack.needed) == ("host memory of a node", engines * 4 * PARAMETERS)
        found = misfit(short)
        assert found is not None and found.remedies == (() if engines == 1 else ("set placement.engines: 4",))
    # with 17 GB for each engine it is the reward model that a GPU must hold
    least = trial(BOTH, on_gpus(), hardware, judge=SMALL, placement={"engines": 8, "slots": 8, "gpu_memory_utilization": 0.2}).needs
    assert (least.ranks, least.gpus, least.peak) == (8, 8, needs_of(facts(Judge(reward_weight=1), LLAMA), on_gpus(), Placement()).peak)


@pytest.mark.parametrize(("reward_model", "judge"), [(LLAMA, SMALL), (SMALL, LLAMA)])
def test_a_machine_must_hold_all_processes_that_score_or_all_engines_that_rate(reward_model, judge):
    placement = {"engines": 3, "slots": 6}
    scoring = needs_of(facts(Judge(reward_weight=1), reward_model), Numerics(), Placement.model_validate(placement))
    rating = needs_of(facts(Judge.model_validate(JUDGED), reward_model, judge=judge), Numerics(), Placement.model_validate(placement))
    assert (scoring.ranks, rating.ranks, rating.together) == (3, 3, 3 * rating.peak)
    exactly = max(scoring.together, rating.together)
    cpu = Hardware("cpu", gpus_per_node=1, host_bytes=exactly)
    given = trial(BOTH, Numerics(), cpu, shape=reward_model, judge=judge, placement=placement)
    fits, short = lacks(given), lacks(replace(given, hardware=replace(cpu, host_bytes=exactly - 1)))
    assert exactly not in [lack.bound for lack in fits] and exactly in [lack.needed for lack in short]


def test_the_profile_for_eight_gpus_without_its_line_for_the_judge_of_70b_is_told_that_line(root):
    project = Project(root)
    graph, execution = load_recipe(project.recipes, "tulu3_8b_onpolicy"), load_execution(project, "gpu8")
    bare = execution.model_copy(update={"stages": {name: found for name, found in execution.stages.items() if name != "rated"}})
    node = next(node for node in graph.nodes.values() if node.name == "rated")
    found = Estimates(project, graph, bare).of(node).misfit
    assert found is not None and "set numerics.tensor_parallel: 4 and placement.engines: 2" in found.remedies


def test_offloading_is_refused_where_there_is_nothing_to_offload_to():
    with pytest.raises(ValueError, match="moves state from the GPU to host memory, but device is cpu"):
        Numerics(offload_optimizer=True)
    with pytest.raises(ValueError, match="zero_stage is 0: set zero_stage to 1, 2 or 3"):
        on_gpus(offload_optimizer=True, zero_stage=0)


# --- machines and amounts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "name", "gib"),
    [
        ("NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15", "h100", 79.6),
        ("NVIDIA H100 PCIe, 81559 MiB, 550.54.15", "h100-pcie", 79.6),
        ("NVIDIA A100-SXM4-40GB, 40960 MiB, 535.1", "a100-40gb", 40),
        ("NVIDIA A100-SXM4-80GB, 81920 MiB, 535.1", "a100-80gb", 80),
        ("NVIDIA H200, 143771 MiB, 550.1", "h200", 140.4),
        ("NVIDIA GeForce RTX 4090, 24564 MiB, 550.1", "rtx4090", 24),
        ("NVIDIA L4, 23034 MiB, 550.1", "l4", 22.5),
        ("Somebody's card, 1024 MiB, 1", None, 1),
    ],
)
def test_the_drivers_words_are_understood(said, name, gib):
    found, gpu = gpu_named(said)
    assert found == name and gpu is not None and gpu.memory_gb == pytest.approx(gib, abs=0.1)


def test_the_profile_says_what_a_gpu_has_before_the_driver_is_asked(monkeypatch):
    monkeypatch.setattr(machines, "this_gpu", lambda: pytest.fail("asked"))
    found = hardware_of("cuda", Machine(gpu="h100", gpu_memory_gb=40))
    assert (found.gpu_bytes, found.peak, found.bandwidth) == (40 * GIB, 989e12, 3350e9)
    with pytest.raises(ValueError, match="is not one of a100-40gb, "):
        Machine(gpu="h1000")


@pytest.mark.parametrize("name", ["olmo2_1b", "tulu3_8b", "tulu31_8b", "tulu3_8b_onpolicy"])
def test_the_recipes_of_published_work_fit_their_profile_even_with_the_longest_prompts(name):
    project = Project(Path(__file__).parents[2])
    graph = load_recipe(project.recipes, name)
    estimates = Estimates(project, graph, load_execution(project, graph.execution))
    assert graph.execution == "gpu8"
    for node in graph.nodes.values():
        found = estimates.of(node)
        engine = found.needs.engine if found.needs else None
        assert found.misfit is None and not found.unknown, node.name
        assert engine is None or engine.room is None or engine.room >= engine.cache, node.name


def test_a_mixture_has_as_many_rows_as_it_says(root, tmp_path):
    clean = "{kind: prepare_data, record: conversation, sources: [{type: packaged, asset: alpaca-en-demo, count: 40}]}"
    (tmp_path / "mixed.yaml").write_text(f"""
stages:
  parts: {clean}
  total: {{kind: prepare_data, record: conversation, total: 300, draw: after_filters,
           sources: [{{type: files, path: a.jsonl, share: 1.0, repeat: true}}]}}
  again: {{kind: prepare_data, in: {{rows: [parts, total]}}, record: conversation, draw: after_filters,
           sources: [{{type: artifact, input: parts, epochs: 2.5}}, {{type: artifact, input: total, count: 7}}]}}
  base: {{kind: source_model, source: {{type: packaged, asset: smollm2-135m-instruct}}}}
  sft: {{kind: sft, in: {{policy: base, data: [again, total]}}, global_batch: 1, max_length: 64, optimizer: {{learning_rate: 1e-4}}}}
""")
    graph = load_recipe(tmp_path, "mixed")
    assert amounts_of(Project(root), graph, graph.find("sft")).rows == Amount(100 + 7 + 300, "at most")


def test_every_form_has_the_number_of_its_items():
    assert all(load_form(name).items for name in form_names())


def test_tokens_of_a_row_by_its_text():
    # "What is 12 + 34?": 4 digits, 12 other characters, 4 of which are a token; 5 for the turn. "46": 2 digits and a turn.
    row = {"messages": [{"role": "user", "content": "What is 12 + 34?"}, {"role": "assistant", "content": "46"}]}
    assert tokens_of(row) == 4 + 3 + 5 + 2 + 5
    assert tokens_of({"messages": [], "answers": [{"text": "ab"}, {"text": "cd"}]}) == 0.5 + 5 + 0.5 + 5
    offered = row | {"template_arguments": {"tools": "[" + "x" * 38 + "]", "enable_thinking": False}}
    assert tokens_of(offered) == tokens_of(row) + 10 + 5


def test_a_bound_stays_a_bound():
    assert Amount(3, "counted").times(Amount(2, "estimated")) == Amount(6, "estimated")
    assert Amount(3, "at most").times(2) == Amount(6, "at most")
    assert Amount(3, "estimated").at_most(2) == Amount(2, "estimated")
