"""Config classes are closed, strict, immutable; what they compute is part of the identity and checked on the way back."""

import hashlib
from functools import cached_property
from pathlib import Path

import pytest
from pydantic import ValidationError, computed_field

from pedigree.configs.base.frozen import Frozen, canonical_json, digest
from pedigree.configs.base.packaged import ASSETS
from pedigree.configs.methods.training import Optimizer
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.source_models import PackagedModel, SourceModel

MODEL = {"source": {"type": "packaged", "asset": "smollm2-135m-instruct"}, "chat_template": "chatml"}


def test_unknown_keys_are_refused():
    with pytest.raises(ValidationError, match="Extra inputs"):
        Optimizer.model_validate({"learning_rate": 0.1, "lr": 0.1})


def test_nothing_is_coerced_to_a_number_and_a_config_cannot_be_changed():
    for value in ("0.1", True, None, "1e-4"):
        with pytest.raises(ValidationError):
            Optimizer.model_validate({"learning_rate": value})
    optimizer = Optimizer(learning_rate=0.1)
    with pytest.raises(ValidationError, match="frozen"):
        optimizer.learning_rate = 0.2  # pyright: ignore[reportAttributeAccessIssue]


def test_a_dump_with_computed_hashes_reads_back_as_the_same_config():
    config = SourceModel.model_validate(MODEL)
    dump = config.model_dump(mode="json")
    assert dump["source"]["sha256"] == ASSETS["smollm2-135m-instruct"].sha256
    assert len(dump["chat_template_sha256"]) == 64
    assert SourceModel.model_validate(dump) == config


def test_a_file_that_changed_behind_a_name_is_refused():
    dump = SourceModel.model_validate(MODEL).model_dump(mode="json")
    for other in ({"chat_template_sha256": "0" * 64}, {"source": dump["source"] | {"sha256": "0" * 64}}):
        with pytest.raises(ValidationError, match="the underlying file has changed"):
            SourceModel.model_validate(dump | other)


def test_a_hash_is_of_the_file_as_it_was_when_the_config_was_loaded(tmp_path):
    class Named(Frozen):
        file: str

        @computed_field
        @cached_property
        def content(self) -> str:
            return Path(self.file).read_text()

    file = tmp_path / "words.txt"
    file.write_text("before")
    config = Named(file=str(file))
    file.write_text("edited during a run")
    assert config.model_dump() == {"file": str(file), "content": "before"}


def test_a_data_asset_is_no_model():
    with pytest.raises(ValidationError, match="alpaca-en-demo"):
        PackagedModel(type="packaged", asset="alpaca-en-demo")


@pytest.mark.parametrize(
    ("path", "problem"), [("", "inside the project"), (".", "normalized"), ("..", "must end in the name"), ("/", "must end")]
)
def test_a_path_that_names_no_file_is_refused(path, problem):
    with pytest.raises(ValidationError, match=problem):
        PrepareData.model_validate({"record": "prompt", "sources": [{"type": "files", "path": path}]})


@pytest.mark.parametrize("path", ["/data/rows.py", "../rows.py"])
def test_programs_are_of_the_project(path):
    with pytest.raises(ValidationError, match="inside the project"):
        PrepareData.model_validate({"record": "prompt", "sources": [{"type": "program", "path": path, "count": 1, "seed": 1}]})


def test_a_task_names_items_and_nothing_else():
    for record, task in (("item", None), ("prompt", "sums")):
        with pytest.raises(ValidationError, match="`task` is required for `record: item`"):
            PrepareData.model_validate({"record": record, "task": task, "sources": [{"type": "files", "path": "rows.jsonl"}]})


def test_canonical_json_has_one_form_and_refuses_what_has_none():
    assert canonical_json({"b": [1, 2.5], "a": "σ"}) == '{"a":"σ","b":[1,2.5]}'
    assert digest({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(float("nan"))
    with pytest.raises(TypeError):
        canonical_json({1, 2})
