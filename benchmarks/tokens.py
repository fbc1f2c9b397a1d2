"""How fast rows become tokens, and what it takes to have them, against the way of before and against the tokenizer alone.

Conversations of the packaged demonstration data, drawn again and again with other numbers in them, under SmolLM2's own tokenizer:

- each row alone, as it was done before (`Chat.training`), its ids in Python's tuples;
- `tokenizer(list)` of the rendered conversations: their ids alone, without which of them are trained;
- ours: `stages/training/token_cache.py` in one process, then in one for each core, and a file of tokens that is opened again.

Times are of the processor (of child processes too, `os.times`), but for opening and for all cores, which are by the clock.

    python -m benchmarks.tokens [--rows 8000]
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Reading, Watch, write
from benchmarks.workloads import packaged

ROUNDS = 3


def rows_of(count: int) -> list[dict[str, Any]]:
    """Conversations from real ones, with new numbers each time, so that new words keep appearing as in real data."""
    found = packaged("alpaca-en-demo", "conversation")
    for row in packaged("dpo-en-demo", "preference"):
        found += [{**row, "messages": [*row["messages"], {"role": "assistant", "content": one["text"]}]} for one in row["answers"]]
    draw = random.Random(0)
    return [varied(draw.choice(found), draw) for _ in range(count)]


def varied(row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    def other(text: str) -> str:
        words = text.split(" ")
        place = draw.randrange(len(words))
        words[place] += f"{draw.choice('abcdefghij')}{draw.randrange(10**4)}"
        return " ".join(words)

    return {**row, "messages": [{**message, "content": other(message["content"])} for message in row["messages"]]}


def seconds(work: Callable[[], object]) -> float:
    """Processor time of this process and of those it has waited for."""
    before = os.times()
    work()
    after = os.times()
    return sum(after[:4]) - sum(before[:4])


def measure(count: int, folder: Path) -> None:
    from pedigree.configs.rows.source_models import TEMPLATES
    from pedigree.data.artifacts import assets
    from pedigree.data.chat.chat import Chat
    from pedigree.data.chat.documents import Conversations, schema, tokenized
    from pedigree.data.chat.token_files import TokenFile, written
    from pedigree.data.host.parallel import mapped
    from pedigree.stages.source_model.run import gguf_tokenizer
    from pedigree.stages.training.token_cache import CHUNK_ROWS

    tokenizer = gguf_tokenizer(assets.path("smollm2-135m-instruct"))
    tokenizer.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    tokenizer.save_pretrained(folder / "tokenizer")
    chat, rows, how = Chat(folder / "tokenizer"), rows_of(count), Conversations("assistant")
    form, cores, path, made = schema(chat.highest_id), len(os.sched_getaffinity(0)), folder / "x.arrow", []

    def before() -> None:
        made[:] = [chat.training(row["messages"]) for row in rows]

    def alone() -> None:
        chat.tokenizer([row["rendered"] for row in rendered], add_special_tokens=False)

    def ours(processes: int) -> None:
        chunks = (rows[begin : begin + CHUNK_ROWS] for begin in range(0, len(rows), CHUNK_ROWS))
        with written(path, folder / "unfinished", form) as file:
            for some in mapped(lambda chunk: tokenized(chunk, how, chat, form), chunks, processes):
                file.write_batch(some)

    rendered = [{"rendered": "".join(piece for piece, _ in chat._template.pieces(row["messages"], ask=False))} for row in rows]
    watch, taken = Watch(), {name: [] for name in ("before", "alone", "one", "cores", "opening")}
    for _ in range(ROUNDS):
        taken["before"].append(seconds(before))
        taken["alone"].append(seconds(alone))
        taken["one"].append(seconds(lambda: ours(1)))
        began = time.perf_counter()
        ours(cores)
        taken["cores"].append(time.perf_counter() - began)
        began = time.perf_counter()
        file = TokenFile(path)
        taken["opening"].append(time.perf_counter() - began)
    tokens = int(file.lengths_D.sum())
    for number, (ids, mask) in enumerate(made):
        found, bits = file.document(number)
        end = len(mask) - mask[::-1].index(True)
        assert found.tolist() == ids[:end] and np.unpackbits(bits, count=end).astype(bool).tolist() == mask[:end], number
    a_row = [1e3 * took / len(rows) for took in taken["before"]]
    about = f"{len(rows)} conversations, {tokens / len(rows):.0f} tokens each; equal ids and masks"
    each = {name: [1e3 * took / len(rows) for took in values] for name, values in taken.items()}
    size = path.stat().st_size / tokens
    readings = [
        Reading("tokenising, against each row alone", each["one"], a_row, "ms of a core per row", False, 5.0, {"text": about}),
        Reading("tokenising, against tokenizer(list) without masks", each["one"], each["alone"], "ms of a core per row", False),
        Reading(
            "tokenising on all cores, against each row alone", each["cores"], a_row, "ms per row", False, None,
            {"text": f"{cores} processes by the clock, one by its processor time"},
        ),
        Reading(
            "tokens at a resume, against tokenising again", taken["opening"], taken["before"], "s", False, None,
            {"text": f"a file of {size:.2f} bytes a token"},
        ),
    ]  # fmt: skip
    write("tokens", readings, ("tokenizers", "transformers", "jinja2", "pyarrow"), watch.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=8_000)
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        measure(given.rows, Path(folder))


if __name__ == "__main__":
    main()
