"""A Llama of random weights with its own tokenizer and template: what tests of generation and RL start from."""

from itertools import pairwise
from pathlib import Path

from configs.datasets import TEMPLATES, RandomLlama
from stages.source_model import adopt, random_llama, train_tokenizer

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
    """Writes a model that answers everything by `Rating: N`, N being drawn from 1 to 5 (at temperature 0 always the same).

    Its layers add nothing, so what follows a token depends on that token only: the head's row of a token is the normed embedding of the
    one before it, and orthogonal to all others but for chance.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from data.chat import Chat

    make(folder, seed=11, context=context)
    chat = Chat(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    letters = {letter: chat.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "Rating: 12345"}
    spoken, digits = [letters[letter] for letter in "Rating: "], [letters[digit] for digit in "12345"]
    chain = [chat.prompt([{"role": "user", "content": "?"}])[-1], *spoken]
    assert len({*chain, *digits, chat.eos_id}) == len(chain) + len(digits) + 1
    after = {token: [before] for before, token in pairwise(chain)}
    after |= {digit: [chain[-1]] for digit in digits} | {chat.eos_id: digits}
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
