"""`source_model` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.shrink import Cut, model_repo
from pedigree.configs.rows.source_models import SourceModel


def shrink(cut: Cut) -> None:
    """Replace the model by a tiny one of its family."""
    assert isinstance(cut.config, SourceModel)
    repo = model_repo(cut.address, cut.config.source)
    licence = (cut.get("source") or {}).get("licence")
    tiny = {"type": "hub", "repo": repo, "revision": cut.stand_ins.commits["model", repo]}
    cut.set("source", tiny | ({"licence": licence} if licence else {}), "weights")


KIND = Kind(
    name="source_model",
    version=3,
    config=SourceModel,
    inputs={"corpus": port("conversation", pooled=True, optional=True)},
    output=gives("policy"),
    engine="torch",
    needs=lambda config: frozenset({"corpus"} if config.source.type == "random_llama" else ()),
    preflight=lambda stage: filter(None, [stage.problem_of(stage.config.source)]),
    frozen=True,
    sources=lambda config: [config["source"]],
    shrink=shrink,
    family="source",
)
