"""The router loss of mixtures of experts: the value and gradient of transformers, however a step is split."""

import re

import models
import policy_lab
import pytest
import router_lab
import torch
from sweeps import nightly_unless

from benchmarks import architectures
from pedigree.configs.base.shrink import Cut, StandIns
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.kinds import KINDS
from pedigree.stages.core.batches import collate
from pedigree.stages.job.failures import StageError
from pedigree.stages.training.router_loss import ROUTER_METRICS, Routers, balancing_loss, loads, routers_of, routing

NAMES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "phimoe", "qwen3_next")
ONE_PASS = Numerics(threads=1)
SPLITS = {
    "prompts not shared": {"attention": "sdpa", "micro_batch_tokens": 48},
    "padded": {"packing": False, "attention": "eager", "micro_batch_sequences": 64},
    "recomputed": {"gradient_checkpointing": True, "micro_batch_tokens": 32},
}


def test_the_loss_of_two_tokens_by_hand():
    """Two layers, three experts, top 1; a prompt token that three answers share, a token of one, and padding.

    f = (4, 4, 0) / 8; P = (3 · 1/2 + 1/5 + 3 · 1/4 + 3/5, ...) / 8.
    """
    first = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.0, 0.0, 1.0]]).log()
    second = torch.tensor([[0.25, 0.5, 0.25], [0.6, 0.3, 0.1], [0.0, 0.0, 1.0]]).log()
    counts_LE, probabilities_E = routing((first, second), torch.tensor([3, 1, 0]), 1)
    assert counts_LE.tolist() == [[3, 1, 0], [1, 3, 0]]
    assert probabilities_E.tolist() == pytest.approx([3.05, 3.4, 1.55])
    assert balancing_loss(counts_LE, probabilities_E, 1).item() == pytest.approx(3 * (0.5 * 3.05 + 0.5 * 3.4) / 8)
    assert [load.item() for load in loads(counts_LE)] == pytest.approx([3 * 3 / 4, 0])


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_transformers(name):
    """On padded rows, in each layer's own form of logits."""
    from importlib import import_module

    theirs = import_module(f"transformers.models.{name}.modeling_{name}").load_balancing_loss_func
    draw = torch.Generator().manual_seed(0)
    logits = [torch.randn(24, 8, generator=draw, requires_grad=True) for _ in range(3)]
    mask = (torch.arange(6) < torch.tensor([6, 2, 5, 3])[:, None]).long()
    expected = theirs(tuple(logits), 8, 3, mask)
    counts_LE, probabilities_E = routing(logits, mask.flatten(), 3)
    found = balancing_loss(counts_LE, probabilities_E, 3)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, own in zip(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-8)


@pytest.fixture(scope="module")
def mixtures(policy, tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            made[name] = router_lab.mixture(tmp_path_factory.mktemp(name), name, policy)
        return made[name]

    return of


@pytest.fixture(scope="module")
def whole(mixtures):
    """A step in one pass, by architecture."""
    made = {}

    def of(name):
        if name not in made:
            padded = Numerics(threads=1, packing=False, attention="sdpa", micro_batch_sequences=64)
            made[name] = router_lab.trained(mixtures(name), padded if name == "qwen3_next" else ONE_PASS)
        return made[name]

    return of


def close(found, expected):
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_unless(("mixtral", "gpt_oss", "qwen3_next"), NAMES))
def test_a_step_is_that_of_transformers_on_padded_answers_that_repeat_their_prompts(mixtures, whole, name):
    """Trained with output_router_logits, as TRL does: loss = NLL + c · aux_loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(mixtures(name).payload, dtype=torch.float32, attn_implementation="eager").eval()
    documents = [doc for unit in router_lab.units() for doc in unit]
    batch = collate([(doc,) for doc in documents], Numerics(packing=False, attention="eager"), 0)
    trained = torch.zeros(batch.input_ids_BT.numel(), dtype=torch.bool).index_fill(0, batch.places_N + 1, True)
    labels = batch.input_ids_BT.masked_fill(~trained.view_as(batch.input_ids_BT), -100)
    seen = model(batch.input_ids_BT, attention_mask=batch.attention_mask_BT, labels=labels, output_router_logits=True, use_cache=False)
    seen.loss.backward()
    ours = whole(name)
    assert ours["aux_loss"] == pytest.approx(seen.aux_loss.item(), rel=1e-5)
    assert ours["loss"] + router_lab.COEFFICIENT * ours["aux_loss"] == pytest.approx(seen.loss.item(), rel=1e-5)
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert any("router" in name or "gate." in name for name in expected)
    for name, gradient in expected.items():
        close(ours["gradient"][name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_of_a_step_gives_one_gradient(mixtures, whole, split):
    found, expected = router_lab.trained(mixtures("mixtral"), Numerics(threads=1, **SPLITS[split])), whole("mixtral")
    for name in ("loss", *ROUTER_METRICS):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    for name, gradient in expected["gradient"].items():
        close(found["gradient"][name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize(("coefficient", "passes"), [(None, {"all": 5, "gradient": 3}), (0.0, {"all": 3, "gradient": 3})])
def test_all_passes_but_the_first_are_repeated_beforehand_where_the_loss_has_a_gradient(mixtures, whole, coefficient, passes):
    found = router_lab.trained(mixtures("mixtral"), Numerics(threads=1, micro_batch_tokens=32), coefficient=coefficient)
    expected = whole("mixtral")
    assert expected["passes"] == {"all": 1, "gradient": 1} and found["passes"] == passes
    assert found["expert_load_max"] == expected["expert_load_max"] > 1.2 and found["expert_load_min"] == expected["expert_load_min"] < 0.8
    assert ("aux_loss" in found) == (coefficient is None)


@pytest.mark.slow
def test_routers_that_adapters_freeze_still_balance_through_what_is_before_them(mixtures):
    with_loss, without = (router_lab.trained(mixtures("mixtral"), ONE_PASS, lora=True, coefficient=c)["gradient"] for c in (0.5, 0.0))
    assert not any("gate" in name for name in with_loss)
    assert any((with_loss[name] - without[name]).norm() > 0.01 * without[name].norm() for name in with_loss if "lora_B" in name)


def test_a_model_without_the_loss_trains_without_it_and_refuses_a_coefficient(mixtures, policy):
    for name, payload in (("deepseek_v3", mixtures("deepseek_v3").payload), ("llama", policy.payload)):
        assert routers_of(payload, None) is None
        with pytest.raises(StageError, match=rf"router_aux_loss_coef is 0\.01, but a {name} has no load-balancing loss .*: remove"):
            routers_of(payload, 0.01)
    assert routers_of(mixtures("mixtral").payload, None) == Routers(2, router_lab.COEFFICIENT)
    assert routers_of(mixtures("mixtral").payload, 0.0) == Routers(2, 0.0)


@pytest.mark.slow
def test_the_page_lists_which_architectures_have_the_loss(tmp_path):
    """And every one of them hands out the logits of its routers."""
    found = {True: set(), False: set()}
    for one in (one for one in architectures.ALL if one.experts):
        one.config().save_pretrained(tmp_path / one.name)
        found[routers_of(tmp_path / one.name, None) is not None].add(one.name)
    names = {one.name for one in architectures.ALL}
    named = [set(re.findall(r"\w+", text)) & names for text in architectures.TAIL.split("\n\n")]
    assert named[1:] == [found[True], found[False]] and found[True] == set(NAMES)


def test_a_rehearsal_drops_the_coefficient_because_its_models_have_no_experts():
    optimizer = {"learning_rate": 1e-3}
    sft = models.config_of("sft", global_batch=4, max_length=96, router_aux_loss_coef=0.1, optimizer=optimizer)
    rlvr = policy_lab.config({"type": "grpo"}, router_aux_loss_coef=0.1, optimizer=optimizer)
    reward_model = models.config_of("reward_model", global_batch=4, max_length=96, optimizer=optimizer)
    for name, config in {"sft": sft, "rlvr": rlvr, "reward_model": reward_model}.items():
        cut = Cut(f"r/{name}", config, {}, StandIns())
        KINDS[name].shrink(cut)
        changed = [change for change in cut.changes if change.setting == "router_aux_loss_coef"]
        assert [change.rehearsed for change in changed] == ([] if name == "reward_model" else [None])
        assert getattr(KINDS[name].config.model_validate(cut.written), "router_aux_loss_coef", None) is None
