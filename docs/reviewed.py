"""Renew `configs/reviewed_code.json` after a change of code that decides scores or drops rows: `python -m docs.reviewed`.

First raise the version of each verifier that may now score an answer otherwise (`stages/verifiers/__init__.py`), or of each kind whose
output changes (`kind.py`): listed code counts as what its version stands for.
"""

import json

from pedigree.data.artifacts.provenance import CODE_ROOT
from pedigree.pipelines.ledger.deciding import REVIEWED, hashes


def main() -> None:
    path = CODE_ROOT / "pedigree" / REVIEWED
    before, now = json.loads(path.read_text()), hashes()
    path.write_text(json.dumps(now, indent=1) + "\n")
    print("\n".join(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)) or "nothing has changed")


if __name__ == "__main__":
    main()
