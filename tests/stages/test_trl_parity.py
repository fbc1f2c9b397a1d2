"""An independent implementation gets the same losses from the same messages: template, masks, log-probs and formulas."""

import copy
from types import SimpleNamespace

import models
import pytest
import torch
from datasets import Dataset

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods import preference as configs
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Conversations, Pairs
from pedigree.stages.core.batches import collate, document
from pedigree.stages.core.preference_losses import Answers, bradley_terry, kto, mismatched, pair_loss
from pedigree.stages.reward_model.run import init_head, targets
from pedigree.stages.training.logprobs import PolicyModule, RewardModule
from pedigree.stages.training.models import load_policy

pytestmark = pytest.mark.slow
COMMON = {"max_length": 128, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A policy, a reference that differs from it, pairs of answers, and the log-probabilities that we find."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    payload = models.tiny_policy(folder).payload
    reference = AutoModelForCausalLM.from_pretrained(payload, dtype=torch.float32).eval()
    policy = copy.deepcopy(reference)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    rows = [
        {
            **{name: row[name] for name in ("id", "source")},
            "messages": row["messages"][:1],
            "chosen": row["messages"][1]["content"],
            "rejected": f"{row['id']} is not known",
            "ended": (True, True),
        }
        for row in models.arithmetic(6)
    ]
    chat = Chat(payload)
    # Our documents end with the end-of-turn token; the line break that ChatML puts behind it is no part of the answer.
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template = chat.template.replace(r"{% endgeneration %}{{ '\n' }}", "{% endgeneration %}")
    assert tokenizer.chat_template != chat.template
    return SimpleNamespace(folder=folder, reference=reference, policy=policy, rows=rows, chat=chat, tokenizer=tokenizer)


def measured(lab, documents, with_reference=True):
    """What our own code finds for these documents."""
    batch = collate([(doc,) for doc in documents], Numerics(attention="sdpa"), lab.chat.pad_id)
    with torch.no_grad():
        logps_D, reference_D = (batch.sum_by_document(PolicyModule(model, 1024)(batch)[0]) for model in (lab.policy, lab.reference))
    lengths_D = torch.tensor([float(doc.num_trained) for doc in documents])
    return Answers(logps_D, reference_D if with_reference else None, lengths_D)


def sides(lab, with_reference=True):
    answers = measured(lab, [doc for unit in models.units(lab.rows, Pairs("adjacent"), lab.chat) for doc in unit], with_reference)
    return answers.select(slice(0, None, 2)), answers.select(slice(1, None, 2))


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def trl_dpo(lab):
    """TRL's loss of the same pairs, in batches of a given size, under any of its settings."""
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": row["messages"], "chosen": said(row["chosen"]), "rejected": said(row["rejected"])} for row in lab.rows]
    trainer = DPOTrainer(
        model=lab.policy,
        ref_model=lab.reference,
        args=DPOConfig(output_dir=str(lab.folder / "dpo"), per_device_train_batch_size=len(rows), **COMMON),
        train_dataset=Dataset.from_list(rows),
        processing_class=lab.tokenizer,
    )

    def loss(size, loss_type, **settings):
        changed = {"loss_types": [loss_type], "loss_weights": [1.0], "f_divergence_type": "reverse_kl", **settings}
        for name, value in changed.items():
            assert hasattr(trainer, name)
            setattr(trainer, name, value)
        found = []
        for start in range(0, len(rows), size):
            batch = trainer.data_collator([trainer.train_dataset[i] for i in range(start, start + size)])
            with torch.no_grad():
                found.append(trainer.compute_loss(lab.policy, batch).item())
        return sum(found) / len(found)

    return loss


FORWARD, JS, ALPHA = configs.ForwardKl(type="forward_kl"), configs.JensenShannon(type="js"), configs.Alpha(type="alpha", alpha=0.3)
DPO_FAMILY = {
    "dpo": (configs.Dpo(type="dpo", beta=0.3), {"loss_type": "sigmoid", "beta": 0.3}),
    "dpo_norm": (configs.DpoNorm(type="dpo_norm"), {"loss_type": "sigmoid_norm", "beta": 5.0}),
    "robust": (configs.Robust(type="robust", epsilon=0.2), {"loss_type": "robust", "beta": 0.1, "label_smoothing": 0.2}),
    "hinge": (configs.Hinge(type="hinge"), {"loss_type": "hinge", "beta": 0.05}),
    "ipo_mean": (configs.IpoMean(type="ipo_mean", beta=0.5), {"loss_type": "ipo", "beta": 0.5}),
    "apo_zero": (configs.ApoZero(type="apo_zero"), {"loss_type": "apo_zero", "beta": 0.1}),
    "apo_down": (configs.ApoDown(type="apo_down"), {"loss_type": "apo_down", "beta": 0.1}),
    "sppo_hard": (configs.SppoHard(type="sppo_hard", beta=0.1), {"loss_type": "sppo_hard", "beta": 0.1}),
    "forward KL": (
        configs.Dpo(type="dpo", divergence=FORWARD),
        {"loss_type": "sigmoid", "beta": 0.1, "f_divergence_type": "forward_kl"},
    ),
    "JS": (configs.Hinge(type="hinge", divergence=JS), {"loss_type": "hinge", "beta": 0.05, "f_divergence_type": "js_divergence"}),
    # TRL's coefficient is 1 - α of the paper
    "alpha": (
        configs.Dpo(type="dpo", divergence=ALPHA),
        {"loss_type": "sigmoid", "beta": 0.1, "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
    ),
    # batches of one: TRL takes the mean over all tokens of a batch, the paper that of each answer
    "rpo": (
        configs.Rpo(type="rpo", nll_weight=0.5),
        {"size": 1, "loss_type": "sigmoid", "loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ours", "settings"), DPO_FAMILY.values(), ids=DPO_FAMILY)
def test_the_dpo_family_is_trls(lab, trl_dpo, ours, settings):
    loss, _ = pair_loss(ours, *sides(lab))
    expected = trl_dpo(**{"size": len(lab.rows), **settings})
    assert loss.item() / len(lab.rows) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    start, _ = pair_loss(ours, *(side.at_reference() for side in sides(lab)))
    assert abs(loss.item() - start.item()) > 1e-3  # policy and reference do differ


def a_trainer(**settings):
    """What TRL's loss methods read of their trainer."""
    return SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **settings)


def test_simpo_and_cpo_are_trls(lab):
    from trl.experimental.cpo import CPOTrainer

    chosen, rejected = sides(lab, with_reference=False)
    settings = {"alpha": 0.0, "label_smoothing": 0.0}
    simpo, _ = pair_loss(configs.Simpo(type="simpo", beta=2.5, gamma=1.4), chosen, rejected)
    theirs = a_trainer(loss_type="simpo", beta=2.5, simpo_gamma=1.4, **settings)
    expected, *_ = CPOTrainer.cpo_loss(theirs, chosen.mean_logps, rejected.mean_logps)
    assert simpo.item() == pytest.approx(expected.sum().item(), rel=1e-5)
    cpo, _ = pair_loss(configs.Cpo(type="cpo", beta=0.01), chosen, rejected)
    expected, *_ = CPOTrainer.cpo_loss(a_trainer(loss_type="sigmoid", beta=0.01, **settings), chosen.logps, rejected.logps)
    assert cpo.item() + chosen.mean_logps.sum().item() == pytest.approx(expected.sum().item(), abs=1e-5)


def test_orpos_odds_ratio_is_trls(lab):
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected = sides(lab, with_reference=False)
    ours, _ = pair_loss(configs.Orpo(type="orpo", odds_weight=0.3), chosen, rejected)
    losses, *_ = ORPOTrainer.odds_ratio_loss(a_trainer(beta=0.3), chosen.mean_logps, rejected.mean_logps)
    assert ours.item() + chosen.mean_logps.sum().item() == pytest.approx(-losses.sum().item(), abs=1e-5)


def test_kto_is_trls_with_its_estimate_of_the_kl(lab):
    from trl import KTOConfig, KTOTrainer

    labels = [i % 3 == 0 for i in range(len(lab.rows))]
    texts = [row["chosen"] if good else row["rejected"] for row, good in zip(lab.rows, labels, strict=True)]
    args = {"desirable_weight": 1.5, "undesirable_weight": 0.75, "beta": 0.4, "per_device_train_batch_size": len(texts)}
    theirs = KTOTrainer(
        model=lab.policy,
        ref_model=lab.reference,
        args=KTOConfig(output_dir=str(lab.folder / "kto"), **args, **COMMON),
        train_dataset=Dataset.from_list(
            [
                {"prompt": row["messages"], "completion": said(text), "label": good}
                for row, text, good in zip(lab.rows, texts, labels, strict=True)
            ]
        ),
        processing_class=lab.tokenizer,
    )
    batch = theirs.data_collator(list(theirs.train_dataset))
    with torch.no_grad():
        expected = theirs.compute_loss(lab.policy, batch).item()

    documents = [document(*lab.chat.answer(row["messages"], text)) for row, text in zip(lab.rows, texts, strict=True)]
    z0 = max(0.0, measured(lab, mismatched(documents, 128)).ratios.mean().item())
    assert z0 > 0.05  # not clamped
    loss = configs.Kto(type="kto", beta=0.4, desirable_weight=1.5, undesirable_weight=0.75)
    ours, _ = kto(loss, measured(lab, documents), torch.tensor(labels), z0)
    assert ours.item() / len(texts) == pytest.approx(expected, rel=1e-5)


def test_reward_loss_is_trls_with_margin_and_centering(lab):
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(
        lab.chat.folder, num_labels=1, dtype=torch.float32, pad_token_id=lab.chat.pad_id
    ).eval()
    init_head(model.score, seed=1)
    with torch.no_grad():
        model.score.weight *= 20  # far from zero: margin and centering matter
    rows = [{**row, "margin": 0.25 * number, "strength": None} for number, row in enumerate(lab.rows)]
    units = models.units(rows, Pairs("adjacent", scored=True), lab.chat)
    batch = collate(list(units), Numerics(attention="sdpa"), lab.chat.pad_id)
    with torch.no_grad():
        scores_D = RewardModule(copy.deepcopy(model))(batch)
    ours, _ = bradley_terry(scores_D[0::2], scores_D[1::2], *targets(rows, 0.5), 0.01)

    theirs = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=str(lab.folder / "reward"),
            center_rewards_coefficient=0.01,
            per_device_train_batch_size=len(rows),
            **COMMON,
        ),
        train_dataset=Dataset.from_list(
            [
                {
                    "prompt": row["messages"],
                    "chosen": said(row["chosen"]),
                    "rejected": said(row["rejected"]),
                    "margin": 0.5 * row["margin"],
                }
                for row in rows
            ]
        ),
        processing_class=lab.chat.tokenizer,
    )
    inputs = next(iter(theirs.get_train_dataloader()))
    with torch.no_grad():
        expected = theirs.compute_loss(model, inputs)
    assert ours.item() / len(rows) == pytest.approx(expected.item(), abs=1e-5)
    assert abs(expected.item() - 0.6931) > 1e-2


SFT_CASES = {
    "assistant": {"assistant_only_loss": True},
    "last_turn": {"completion_only_loss": True},
    "all": {},
}


def conversations():
    """Conversations of one and two questions."""
    further = [{"role": "user", "content": "And twice that?"}, {"role": "assistant", "content": "I do not know."}]
    return [{**row, "messages": row["messages"] + further * (i % 2)} for i, row in enumerate(models.arithmetic(6))]


@pytest.mark.parametrize(("train_on", "settings"), SFT_CASES.items(), ids=SFT_CASES)
def test_sft_loss_is_trls(tmp_path, policy, train_on, settings):
    from trl import SFTConfig, SFTTrainer

    numerics, chat = Numerics(), Chat(policy.payload)
    module: PolicyModule = load_policy(policy, numerics)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():  # a fresh model gives every token nearly the same probability
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    units = models.units(conversations(), Conversations(train_on), chat)
    with torch.no_grad():
        logps_N, _ = module(collate(units, numerics, chat.pad_id))
    ours = -logps_N.sum().item() / sum(doc.num_trained for (doc,) in units)

    if train_on == "last_turn":  # the line break that ChatML puts behind an answer is a part of TRL's completions, not of ours
        further = r"{% if not loop.last %}{{ '\n' }}{% endif %}"
        chat.tokenizer.chat_template = chat.template.replace(r"{{ '\n' }}{% else", further + "{% else")
        assert chat.tokenizer.chat_template != chat.template
        data = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in conversations()]
    else:
        data = [{"messages": row["messages"]} for row in conversations()]
    module.model.set_attn_implementation("sdpa")
    arguments = SFTConfig(output_dir=str(tmp_path), per_device_train_batch_size=len(data), **COMMON, **settings)
    theirs = SFTTrainer(model=module.model, args=arguments, train_dataset=Dataset.from_list(data), processing_class=chat.tokenizer)
    with torch.no_grad():
        expected = theirs.compute_loss(module.model, next(iter(theirs.get_train_dataloader())))
    assert ours == pytest.approx(expected.item(), abs=1e-5)
