import pytest
from pydantic import ValidationError

from pedigree.configs.judging.scoring import Judge
from pedigree.configs.methods import rubrics
from pedigree.configs.methods.language_model import key_variable
from pedigree.configs.methods.rubrics import load_rubric, rubric_names, rubrics_of

RATING = {"rubrics": ["helpfulness", "honesty"], "by": {"type": "policy"}}
SERVER = {"type": "endpoint", "base_url": "https://judge.example/v1", "model": "m"}


def judge(**fields):
    return Judge.model_validate({"rating": RATING, "rating_weight": 1.0, **fields})


def test_the_aspects_of_tulu_3_are_shipped_each_with_a_scale_of_five():
    assert rubric_names() == ["helpfulness", "honesty", "instruction_following", "truthfulness"]
    assert len({meaning for name in rubric_names() for meaning in load_rubric(name).scale}) == 20


def test_every_word_that_is_asked_is_identity(monkeypatch):
    before = judge().model_dump(mode="json")
    assert Judge.model_validate(before) == judge()
    assert set(before["rating"]["wording_sha256"]) == {"frame", "helpfulness", "honesty"}
    monkeypatch.setattr(rubrics, "FRAME", rubrics.FRAME + " please")
    after = judge().model_dump(mode="json")
    assert after != before and after["rating"]["wording_sha256"]["honesty"] == before["rating"]["wording_sha256"]["honesty"]
    with pytest.raises(ValidationError, match="has changed"):
        Judge.model_validate(before)


def test_an_edited_rubric_is_another_judge(tmp_path, monkeypatch):
    for name in rubric_names():
        (tmp_path / f"{name}.yaml").write_text((rubrics.RUBRICS / f"{name}.yaml").read_text())
    monkeypatch.setattr(rubrics, "RUBRICS", tmp_path)
    before = judge().model_dump()
    (tmp_path / "honesty.yaml").write_text((tmp_path / "honesty.yaml").read_text().replace("one remark", "a remark"))
    after = judge().model_dump()
    assert before["rating"]["wording_sha256"]["honesty"] != after["rating"]["wording_sha256"]["honesty"]


def rated_by(*names):
    return judge(rating={**RATING, "rubrics": [*names]})


def test_a_rubric_of_the_project_is_named_by_its_path():
    """Its content is a dependency of the stage, so that it is identity there."""
    assert set(rated_by("honesty", "mine/brevity.yaml").rating.wording_sha256) == {"frame", "honesty"}
    for names, problem in (
        (
            ("brevity",),
            "'brevity' is not one of helpfulness, .*: for a rubric of your own write its path in the project, such as configs/rubrics/",
        ),
        (("honesty", "mine/honesty.yaml"), "duplicate rubric in honesty, mine/honesty.yaml"),
        (("../brevity.yaml",), "must be a normalized path inside the project"),
    ):
        with pytest.raises(ValidationError, match=problem):
            rated_by(*names)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version: 1\naspect: a\nquestion: q\nscale: [a, b, c, d]\n", "scale"),
        ("version: 1\naspect: a\nquestion: q\nscale: [a, b, c, d, e, f]\n", "scale"),
        ("version: 1\naspect: a\nscale: [a, b, c, d, e]\n", "question"),
        ("[", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_rubric_is_named(tmp_path, monkeypatch, text, problem):
    (tmp_path / "odd.yaml").write_text(text)
    monkeypatch.setattr(rubrics, "RUBRICS", tmp_path)
    load_rubric.cache_clear()
    with pytest.raises(ValueError, match=f"(?s)mine/odd.yaml:[0-9]+: .*{problem}"):
        rubrics_of(["mine/odd.yaml"], {"mine/odd.yaml": tmp_path / "odd.yaml"})
    with pytest.raises(ValueError, match=f"(?s)rubrics/odd.yaml:[0-9]+: .*{problem}"):
        load_rubric("odd")
    load_rubric.cache_clear()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rating_weight": 0.0}, "rating_weight is 0: raise it, or remove rating"),
        ({"rating": None}, "rating_weight is 1.0, but rating is not set"),
        ({"rating": None, "rating_weight": 0.0, "verifier_weight": 0.0}, "are all 0, so no answer gets a score"),
        ({"rating": RATING | {"rubrics": ["kindness"]}}, "rubric 'kindness' is not one of helpfulness, honesty"),
        ({"rating": RATING | {"rubrics": ["honesty", "honesty"]}}, "duplicate rubric"),
        ({"rating": RATING | {"rubrics": []}}, "at least 1 item"),
        ({"max_unscored_share": 1.0}, "less than 1"),
        ({"rating": RATING | {"by": SERVER | {"base_url": "judge.example/v1"}}}, "is not http://HOST:PORT/PATH"),
        ({"rating": RATING | {"by": SERVER | {"base_url": "file:///v1"}}}, "is not http://HOST:PORT/PATH"),
        ({"rating": RATING | {"by": SERVER | {"base_url": "http://x:y/v1"}}}, "Port"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(fields, problem):
    with pytest.raises(ValidationError, match=problem):
        judge(**fields)


def test_a_key_in_a_url_is_refused_without_being_repeated():
    for url in ("https://me:s3cret@judge.example/v1", "https://judge.example/v1?api_key=s3cret"):
        with pytest.raises(ValidationError) as raised:
            judge(rating=RATING | {"by": SERVER | {"base_url": url}})
        assert "must not contain credentials" in raised.value.errors()[0]["msg"] and "s3cret" not in raised.value.errors()[0]["msg"]


def test_a_key_is_named_after_the_host_that_it_goes_to():
    assert key_variable("https://api.openai.com/v1") == "PEDIGREE_API_OPENAI_COM_KEY"
    assert key_variable("http://127.0.0.1:8000/v1") == "PEDIGREE_127_0_0_1_KEY"
    hosts = ("api.openai.com", "api-openai.com", "api_openai.com", "apiopenai.com", "api.openai.com.evil.example")
    assert len({key_variable(f"https://{host}/v1") for host in hosts}) == len(hosts)
