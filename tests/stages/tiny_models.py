"""A Llama of random weights with its own tokenizer and template: what tests of generation and RL start from."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from models import publish

from pedigree.configs.rows.source_models import TEMPLATES, RandomLlama
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.stages.source_model.run import random_llama, train_tokenizer
from pedigree.stages.training.chat_format import adopt

TEXTS = ["What is 12 + 34?", "46", "What is 7 - 3?", "The answer is 4."] * 5


def make(folder: Path, *, seed: int = 0, layers: int = 2, context: int = 256) -> Path:
    """Writes the model into `folder`; other seeds give other weights of the same architecture."""
    wanted = RandomLlama(
        type="random_llama", layers=layers, hidden=128, heads=4, kv_heads=2, ffn=256, vocabulary=512, context=context, seed=seed
    )
    tokenizer = train_tokenizer(TEXTS, wanted.vocabulary)
    model = random_llama(wanted, tokenizer)
    adopt(model, tokenizer, (TEMPLATES / "chatml.jinja").read_text())
    for parameter in model.parameters():  # a fresh initialisation is nearly uniform over tokens: spread it
        parameter.data.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_judge(folder: Path, *, context: int = 8192) -> Path:
    """Writes a model that answers everything by `Rating: N`, N being drawn from 1 to 5 (at temperature 0 always the same)."""
    return _speaking(make(folder, seed=11, context=context), "Rating: ", "12345", "")


def make_writer(folder: Path, *, context: int = 2048) -> Path:
    """Writes a model that answers everything by `<prompt>Say N</prompt>`, N being drawn from 1 to 5; each mark is one token."""
    return _speaking(make(folder, seed=12, context=context), ["<prompt>", *"Say "], "12345", ["</prompt>"])


def make_reward_model(folder: Path, *, seed: int, mean: float, std: float) -> Path:
    """Writes a reward model with a random head, and the statistics of its rewards."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from pedigree.data.chat.chat import Chat

    make(folder, seed=seed)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = Chat(folder).pad_id
    model.save_pretrained(folder)
    (folder / "reward_stats.json").write_text(json.dumps({"mean": mean, "std": std}))
    return folder


def make_policies(folder: Path) -> dict[str, Artifact]:
    """Two policies of one architecture, and one of another."""
    for name, options in {"a": {}, "b": {"seed": 1}, "deep": {"layers": 3}}.items():
        make(folder / name / "payload", **options)
    return {name: publish(folder / name, "source_model", "policy") for name in ("a", "b", "deep")}


def _speaking(folder: Path, opening: Sequence[str], choices: Sequence[str], closing: Sequence[str]) -> Path:
    """Makes the model of a folder say the opening, one of the choices and the closing, each a series of tokens of its own.

    Its layers add nothing, so what follows a token depends on that token only: the head's row of a token is the normed embedding of the
    one before it, and orthogonal to all others but for chance.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from pedigree.data.chat.chat import Chat

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = Chat(folder)
    marks = [text for text in (*opening, *closing) if len(text) > 1]
    if chat.tokenizer.add_tokens(marks):
        model.resize_token_embeddings(len(chat.tokenizer), mean_resizing=False)
        chat.tokenizer.save_pretrained(folder)
    said, either, end = (
        [chat.tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in texts] for texts in (opening, choices, closing)
    )
    chain, ending = [chat.prompt([{"role": "user", "content": "?"}])[-1], *said], [*end, chat.eos_id]
    assert len({*chain, *either, *ending}) == len(chain) + len(either) + len(ending)
    after = {token: [before] for before, token in [*pairwise(chain), *pairwise(ending)]}
    after |= {choice: [chain[-1]] for choice in either} | {ending[0]: either}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        normed = torch.nn.functional.rms_norm(model.model.embed_tokens.weight, (model.config.hidden_size,))
        head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
        head.weight.zero_()
        for token, before in after.items():
            head.weight[token] = 0.5 * normed[before].sum(0)
    model.lm_head, model.config.tie_word_embeddings = head, False
    model.save_pretrained(folder)
    return folder
