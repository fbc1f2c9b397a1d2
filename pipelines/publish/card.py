"""Model or dataset card: hub metadata, provenance, usage, and license conditions."""

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.licenses import HUB
from pedigree.configs.language.kinds import sources_of
from pedigree.data.artifacts.artifacts import Record
from pedigree.pipelines.lineage.ancestry import Pedigree
from pedigree.pipelines.lineage.evaluations import Evaluation
from pedigree.pipelines.lineage.standards import ROW_FILES
from pedigree.pipelines.lineage.waivers import waived_of
from pedigree.pipelines.publish.attribution import Origin, all_licences, cell, makes_rows, section

CARD = "README.md"
PIPELINE_TAGS = {"policy": "text-generation", "reward_model": "text-classification"}
USE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```"""


def card(pedigree: Pedigree, name: str, evaluations: Sequence[Evaluation] = (), licences: Sequence[Origin] = ()) -> str:
    """Render `README.md` of an artifact, with its address as the title, the evaluations that scored it, and its external sources
    (`pipelines.publish.attribution.origins`).
    """
    record = pedigree.record
    ancestors = [found.record for found in pedigree.parents_first()[:-1]]
    head = metadata(pedigree, name, evaluations, licences)
    stages = "\n".join(f"| {made.kind} | `{made.key[:12]}` | `{made.content[:12]}` |" for made in [*ancestors, record])
    metrics = "\n".join(f"- {key}: {value}" for key, value in sorted(record.metrics.items()) if isinstance(value, int | float | str))
    config = yaml.safe_dump(record.config, sort_keys=True, allow_unicode=True)
    noted = dict.fromkeys(mark for found in pedigree.material() if found.record.type in MODELS for mark in found.record.marks)
    marks = "".join(f"> **Note:** {mark}\n\n" for mark in {**noted, **dict.fromkeys(record.marks)})
    made_by = f"Type `{record.type}`, produced by the Pedigree stage `{record.kind}` (version {record.version})."
    parts = [
        f"---\n{head}\n---\n\n# {name}\n\n{marks}{made_by}",
        f"- key `{record.key}`\n- content `{record.content}`\n- id `{record.id}`",
        *([USE] if record.type == "policy" else []),
        section(licences),
        *waivers(pedigree),
        f"## Configuration\n\n```yaml\n{config}```",
        *([f"## Recorded metrics\n\n{metrics}"] if metrics else []),
        f"## Pedigree\n\n`pedigree/` holds the records of this artifact and its {len(ancestors)} ancestors.\n\n"
        f"| stage | key | content |\n|---|---|---|\n{stages}",
    ]
    return "\n\n".join(parts) + "\n"


def waivers(pedigree: Pedigree) -> list[str]:
    """Section on training rows kept despite overlapping benchmark items; empty if there are none."""
    found = waived_of(pedigree)
    if not found:
        return []
    lines = [f"| {cell(one.benchmark)} | {one.rows:,} | {len(one.items):,} | {cell(one.because)} |" for one in found]
    table = "\n".join(["| benchmark | rows | items | reason |", "|---|---|---|---|", *lines])
    note = "Training data includes rows that overlap with items of these benchmarks, so scores on them are less reliable."
    return [f"## Waivers\n\n{note}\n\n{table}"]


def metadata(pedigree: Pedigree, name: str, evaluations: Sequence[Evaluation], licences: Sequence[Origin]) -> str:
    """YAML front matter of a card, in the Hugging Face hub's format."""
    from huggingface_hub.repocard_data import DatasetCardData, ModelCardData

    record = pedigree.record
    given: dict[str, Any] = {"tags": ["pedigree", record.kind.replace("_", "-")], **_licence(licences)}
    if record.type not in MODELS:
        if names := pedigree.row_files():  # else the hub and `datasets` would read the JSON files of the export
            rows = {"split": "train", "path": names[0] if len(names) == 1 else ROW_FILES["includes"]}
            given["configs"] = [{"config_name": "default", "data_files": [rows]}]
        return DatasetCardData(**given).to_yaml()
    bases = _hub_ids(weights_of(pedigree)[1:])
    if bases:
        given |= {"base_model": bases if len(bases) > 1 else bases[0], "base_model_relation": "finetune"}
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINE_TAGS[record.type],
        datasets=datasets_of(found.record for found in pedigree.material()[:-1]) or None,
        model_name=name if evaluations else None,
        eval_results=[result for found in evaluations for result in _results(found)] or None,
        **given,
    ).to_yaml()


def weights_of(pedigree: Pedigree) -> list[Record]:
    """The records of a model and of those that its weights come from: a trained model continues only its `policy`."""
    found = [pedigree.id]
    for identifier in found:
        inputs = pedigree.entries[identifier][0].inputs
        trained = any(given.port == "policy" for given in inputs)
        parents = [given.producer for given in inputs if given.port == "policy" or not trained]
        found += [name for name in parents if pedigree.entries[name][0].type in MODELS and name not in found]
    return [pedigree.entries[identifier][0] for identifier in found]


def datasets_of(records: Iterable[Record]) -> list[str]:
    """Hub ids of the training datasets; excludes procedural rows and benchmarks."""
    return _hub_ids(filter(makes_rows, records))


def _hub_ids(records: Iterable[Record]) -> list[str]:
    """The hub rejects or misreads other names, which stand in the card's table of licenses."""
    return sorted({source["repo"] for made in records for source in sources_of(made.kind, made.config) if source.get("type") == "hub"})


def _licence(licences: Sequence[Origin]) -> dict[str, str]:
    """The shared license if there is one that the hub knows, else `other` named by the combined expression; empty without external
    sources.
    """
    names = all_licences(licences)
    if not names:
        return {}
    if len(names) == 1 and (known := {names[0], names[0].removesuffix("-1.0")} & HUB):  # the hub calls `odc-by-1.0` of SPDX `odc-by`
        return {"license": min(known)}
    combined = " AND ".join(f"({name})" if " " in name and len(names) > 1 else name for name in names)  # as in SPDX
    return {"license": "other", "license_name": combined, "license_link": "README.md#licenses"}


def _results(evaluation: Evaluation) -> list[Any]:
    """An evaluation in the format of model hubs."""
    from huggingface_hub.repocard_data import EvalResult

    return [
        EvalResult(
            task_type="text-generation", dataset_type=task, dataset_name=task,
            metric_type="score", metric_name=f"mean score of {found['n']} items", metric_value=found["mean"],
        )
        for task, found in sorted(evaluation.table().items())
    ]  # fmt: skip
