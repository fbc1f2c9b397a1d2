"""`merge` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.methods.merging import Merge, merge_problem

KIND = Kind(
    name="merge",
    version=1,
    config=Merge,
    inputs={"policies": port("policy", many=True, merged=True)},
    output=gives("policy"),
    engine="torch",
    problem=merge_problem,
    family="training",
)
