import pytest
from pydantic import TypeAdapter, ValidationError

from pedigree.configs.base.frozen import PortInput
from pedigree.configs.methods.policy_gradient import Algorithm, Kl, Resampling
from pedigree.configs.methods.training import Rlvr, rlvr_problem
from pedigree.stages.core.policy_losses import adapted

READ = TypeAdapter(Algorithm).validate_python
FIELDS = {
    "algorithm": {"type": "dapo"},
    "steps": 4,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "sampling": {"max_tokens": 8},
    "max_prompt_length": 60,
    "optimizer": {"learning_rate": 1e-3},
}
CRITIC = {"optimizer": {"learning_rate": 1e-3}}


def test_defaults_are_the_papers():
    grpo, dapo, gspo, ppo = READ({"type": "grpo"}), READ({"type": "dapo"}), READ({"type": "gspo"}), READ({"type": "ppo", "critic": CRITIC})
    assert (grpo.clip_low, grpo.clip_high, grpo.aggregation, grpo.kl) == (0.2, 0.2, "seq-mean-token-mean", Kl(coefficient=0.04))
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation, dapo.kl) == (0.2, 0.28, "token-mean", None)
    assert dapo.resampling == Resampling(max_batches=10) and grpo.resampling is None and "resampling" not in grpo.model_dump()
    assert (gspo.clip_low, gspo.clip_high, gspo.updates) == (3e-4, 4e-4, 4)
    assert (ppo.gamma, ppo.gae_lambda, ppo.updates, ppo.kl.where) == (1.0, 0.95, 4, "reward")
    assert READ({"type": "grpo", "kl": None}).kl is None


def test_a_bonus_that_cannot_act_is_refused():
    with pytest.raises(ValidationError, match=r"coefficient is 0, so there is no bonus: raise it, or remove `entropy`"):
        READ({"type": "dapo", "entropy": {"coefficient": 0.0}})
    with pytest.raises(ValidationError, match=r"coefficient 2.0 is outside low 0.0 and high 1.0"):
        READ({"type": "dapo", "entropy": {"coefficient": 2.0, "adaptive": {"target": 0.2}}})
    assert READ({"type": "dapo", "entropy": {"coefficient": 0.0, "adaptive": {"target": 0.2}}}).entropy.adaptive.step == 0.005
    assert READ({"type": "dapo", "top_entropy": 0.2}).looks and not READ({"type": "dapo"}).looks and READ({"type": "rloo"}).looks


@pytest.mark.parametrize(
    ("batch", "samples", "fields", "sound"),
    [
        (512, 16, {"kl": {"adaptive": {"horizon": 1000}}}, None),  # 0.2 · 8192 = 1638.4
        (512, 16, {"kl": {"adaptive": {"horizon": 1638.5}}}, 1638.5),
        (512, 16, {"kl": {"adaptive": {"horizon": 1000}}, "keep": {"answers": 4}}, 1000),  # 0.2 · 2048
        (4096, 16, {"kl": {"adaptive": {}}}, None),  # 0.2 · 65536 = 13107.2
        (250, 4, {"kl": {"adaptive": {"horizon": 200}}}, None),  # exactly 0
        (4096, 16, {"kl": {}}, 0),
    ],
)
def test_a_step_whose_coefficient_could_reach_zero_is_refused(batch, samples, fields, sound):
    algorithm = {"type": "dapo", **fields, "kl": {"coefficient": 0.05, **fields["kl"]}}
    config = FIELDS | {"algorithm": algorithm, "prompts_per_step": batch, "samples_per_prompt": samples}
    if sound is None:
        least = batch * samples / 5
        with pytest.raises(ValidationError, match=f"a step of {batch * samples} answers may take .* set it above {least:g}, e.g. to"):
            Rlvr.model_validate(config)
    else:
        adaptive = Rlvr.model_validate(config).algorithm.kl.adaptive
        assert not sound or adapted(0.05, 0.0, batch * fields.get("keep", {}).get("answers", samples), adaptive) > 0


def test_a_teacher_and_its_input_belong_together():
    policy = {"p": PortInput("policy", Resampling())}

    def problem(algorithm, *ports):
        return rlvr_problem(Rlvr.model_validate(FIELDS | {"algorithm": {"type": "dapo", **algorithm}}), dict.fromkeys(ports, policy))

    assert "input teacher is set, but algorithm.teacher is not" in problem({}, "teacher")
    assert "algorithm.teacher is set, but the input teacher is missing" in problem({"teacher": {}})
    assert problem({"teacher": {}}, "teacher") is None
    assert "the input reference is set" in problem({"teacher": {}}, "teacher", "reference")
    assert problem({"teacher": {"against": "reference"}}, "teacher", "reference") is None


def test_some_algorithms_fix_their_aggregation():
    for type in ("rloo", "dcpo"):
        with pytest.raises(ValidationError, match=r"aggregation\n.*Extra inputs"):
            READ({"type": type, "aggregation": "token-mean"})
    with pytest.raises(ValidationError, match="updates_per_rollout"):  # without a bound on ρ one update is all that is sound
        READ({"type": "remax", "updates_per_rollout": 2})


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        ({"estimator": "k1"}, "k1 in the loss has no gradient on average"),
        ({"estimator": "k2", "unbiased": True}, "unbiased applies only to k1 and k3 in the loss"),
        ({"where": "reward", "unbiased": True}, "unbiased applies only to k1 and k3 in the loss"),
    ],
)
def test_penalties_that_would_do_nothing_are_refused(kl, message):
    with pytest.raises(ValidationError, match=message):
        Kl.model_validate({"coefficient": 0.1, **kl})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"temperature": 0.0, "max_tokens": 8}}, "temperature is 0"),
        ({"sampling": {"top_p": 0.9, "max_tokens": 8}}, "top_p is 0.9, but must be 1"),
        ({"samples_per_prompt": 1}, "dapo compares the answers to a prompt, so samples_per_prompt must be at least 2"),
        ({"algorithm": {"type": "dapo", "updates_per_rollout": 5}}, "5 exceeds prompts_per_step 4"),
        ({"algorithm": {"type": "ppo", "critic": {**CRITIC, "warmup_steps": 4}}}, "warmup_steps 4 leaves none of the 4 steps"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        Rlvr.model_validate(FIELDS | change)


@pytest.mark.parametrize("type", ["remax", "reinforce_pp"])
def test_one_answer_is_enough_where_none_are_compared(type):
    assert Rlvr.model_validate(FIELDS | {"algorithm": {"type": type}, "samples_per_prompt": 1}).samples_per_prompt == 1
