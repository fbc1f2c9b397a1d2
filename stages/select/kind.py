"""`select` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.judging.measuring import Select

KIND = Kind(
    name="select",
    version=1,
    config=Select,
    inputs={"candidates": port("policy", many=True), "scores": port("scores")},
    output=gives("policy"),
    frozen=True,
    family="measuring",
    decided_by=lambda config: ("stages/select/run.py",),
)
