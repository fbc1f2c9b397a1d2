"""What is said in other words is found by vectors, the same ones in whatever order and number texts are looked at."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from waiting import deadline

from pedigree.configs.base.packaged import EMBEDDER
from pedigree.configs.rows.overlap_criteria import Abstracted, Decontaminate, Embedded, Waiver
from pedigree.data.artifacts import assets
from pedigree.data.contamination import paraphrases
from pedigree.data.contamination.decontamination import Comparison
from pedigree.data.contamination.paraphrases import BLOCK, Embedder, nearest

ITEM = "Noor bought 3 boxes with 12 pencils each and gave half of them to her sister. How many pencils does she have left?"
REWORDED = "Her sister received one half of the pencils out of the three cartons of twelve that Noor purchased. How many remain for Noor?"
OTHER = "Please write me a short poem about the sea in winter, with gulls and without rhymes."


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


@pytest.mark.integration
def test_processes_that_are_forked_after_it_wait_for_no_thread_of_its_tokenizer():
    """Whatever the environment says: the threads of a tokenizer that was used are not in the processes, and its locks are."""
    code = """
from pedigree.data.contamination.paraphrases import Embedder
from pedigree.data.host.parallel import mapped
embedder = Embedder()
embedder.vectors(["a b c"] * 1000)
print(len(list(mapped(lambda number: embedder.vectors(["a b c"] * 1000).shape, range(4), 2))))
"""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=deadline(60), check=True)
    assert done.stdout == "4\n"


def row(*texts: str) -> dict:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def found(config: Decontaminate, *rows: dict) -> list[list[tuple[str, str, bool]]]:
    items = [{"id": "poem", "question": "Which gas do plants take up when the sun shines?"}, {"id": "pencils", "question": ITEM}]
    every = Comparison({"suite": items}, config).overlaps(rows)
    return [[(one.item["id"], one.doubt, one.way == "embedded") for one in some] for some in every]


def test_a_vector_is_the_mean_of_those_of_the_tokens(embedder):
    """By torch, which embeds and pools in one operation."""
    tokenizer = Tokenizer.from_file(str(assets.path(EMBEDDER["tokenizer"])))
    (table,) = load_file(assets.path(EMBEDDER["vectors"])).values()
    ids = torch.tensor([tokenizer.encode(ITEM, add_special_tokens=False).ids])
    mean = torch.nn.functional.embedding_bag(ids, table.float(), mode="mean")[0]
    (vector,) = embedder.vectors([ITEM])
    assert np.abs(vector / paraphrases.LENGTH - (mean / mean.norm()).numpy()).max() <= 0.51 / paraphrases.LENGTH


def test_long_texts_are_added_piece_by_piece(embedder, monkeypatch):
    whole = embedder.vectors([ITEM])
    monkeypatch.setattr(paraphrases, "PIECE", 3)
    assert (embedder.vectors([ITEM]) == whole).all()


def test_products_are_exact_and_no_text_depends_on_its_neighbours(embedder):
    texts = [f"{ITEM[: number % 90 + 5]} {number} {OTHER[number % 40 :]}" for number in range(2 * BLOCK + 7)]
    vectors, others = embedder.vectors(texts), embedder.vectors([ITEM, OTHER, REWORDED, ITEM])
    assert (vectors == np.concatenate([embedder.vectors([text]) for text in texts])).all()
    exact = vectors.astype(np.int64) @ others.astype(np.int64).T
    assert abs(exact).max() < 1 << 24 and (vectors @ others.T == exact).all()
    order = np.argsort(-exact, axis=1, kind="stable")
    for most in (1, 3, 9):
        numbers, cosines = nearest(vectors, others, most)
        assert (numbers == order[:, :most]).all() and numbers.shape == (len(texts), min(most, 4))
        assert (cosines == np.take_along_axis(exact, numbers, axis=1) / paraphrases.LENGTH**2).all()


def test_other_words_are_found_by_vectors_alone_and_only_told():
    strict = Decontaminate(ngram=4, threshold=0.8, typos=True, abstracted=Abstracted())
    assert found(strict, row(REWORDED)) == [[]]
    told = strict.model_copy(update={"embedded": Embedded(threshold=0.7)})
    assert found(told, row(OTHER, REWORDED), row(OTHER), row()) == [[("pencils", "only alike", True)], [], []]
    removed = strict.model_copy(update={"embedded": Embedded(threshold=0.7, remove=True)})
    assert found(removed, row(REWORDED)) == [[("pencils", "", True)]]


def test_a_copy_that_n_grams_find_is_theirs_and_one_with_a_doubt_is_both():
    config = Decontaminate(embedded=Embedded())
    assert found(config, row(ITEM)) == [[("pencils", "", False)]]
    doubtful = Decontaminate(threshold=0.9, report=0.2, embedded=Embedded(threshold=0.8))
    half = "Noor bought 3 boxes with 12 pencils each and gave one half of the pencils to her dear sister. How many are left for Noor?"
    assert found(doubtful, row(half)) == [[("pencils", "below the threshold", False), ("pencils", "only alike", True)]]


def test_a_text_that_no_encoding_has_is_read(embedder):
    assert (embedder.vectors(["\ud800 x"]) == embedder.vectors(["? x"])).all() and not embedder.vectors([""]).any()


def test_a_waiver_hides_no_other_item():
    """Neither one that n-grams find, nor one that is nearer."""
    benchmarks = {"mine": [{"id": "m", "question": OTHER}, {"id": "near", "question": REWORDED}], "suite": [{"id": "p", "question": ITEM}]}
    waivers = (Waiver(benchmark="mine", items="all", because="it is mine"),)
    config = Decontaminate(embedded=Embedded(threshold=0.7, remove=True), waivers=waivers)
    copied, like = Comparison(benchmarks, config).overlaps([row(OTHER, REWORDED), row(ITEM.replace("bought", "has bought"))])
    assert [(one.item["id"], one.way == "embedded") for one in copied] == [("m", False), ("near", False), ("p", True)]
    assert ("suite", "p") in {(one.benchmark, one.item["id"]) for one in like}
