"""A Llama of random weights with its own tokenizer and template: what tests of generation and RL start from."""

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
