"""One package per kind of stage, `kind.py` and `run.py`, and the rooms that they share.

The environment variable `PEDIGREE_STAGES` names a folder with more kinds.
"""

import os

if folder := os.environ.get("PEDIGREE_STAGES"):
    __path__.append(os.path.abspath(folder))
