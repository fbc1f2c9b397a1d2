"""Secrets are found by their form or by the environment, are refused where recipes are read, and are never repeated."""

import pytest

from pedigree.configs.base.document import ConfigError, read_document
from pedigree.configs.base.secrets import find_secrets, secret_variables
from pedigree.configs.language.recipe import load_recipe

LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1eF3hJ5kL7n"  # 40; put together here, so that no scanner takes this file for a leak
SAMPLES = {
    "an AWS access key": "AKIA" + LETTERS[:16].upper(),
    "an AWS secret key": "aws_secret_access_key = " + LETTERS,
    "a GitHub token": "ghp_" + LETTERS[:36],
    "a GitLab token": "glpat-" + LETTERS[:20],
    "a Google API key": "AIza" + LETTERS[:35],
    "a Hugging Face token": "hf_" + LETTERS[:34],
    "a Slack token": "xoxb-" + LETTERS[:24],
    "an API key": "sk-proj-" + LETTERS,
    "a private key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----",
    "a password in a URL": "s3://someone:" + "pass@host/bucket",
}


def test_a_password_may_be_a_parameter_of_a_url():
    assert find_secrets("https://host/data?version=1&token=" + "abc", {}) == ["a password in a URL"]


def test_ordinary_text_holds_none():
    for text in (
        "https://example.org:8080/a@b?revision=main",
        "s3://bucket/raw/part-0001.parquet",
        "git@github.com:owner/repository.git",
        "f'{scheme}://{user}:{password}@{host}'",
        "half_precision and sk-learn and risk-averse-" + "x" * 30,
        "0123456789abcdef" * 4,  # a hash
        "api_key=os.environ['OPENAI_API_KEY']",
    ):
        assert find_secrets(text, {}) == []


def test_values_of_secret_variables_are_found_by_name(monkeypatch):
    variables = {"SERVICE_TOKEN": "plain-looking", "db_password": "correct horse", "API_AUTH_STRING": "admin:battery",
                 "SHORT_KEY": "seven77", "EDITOR": "plain-looking"}  # fmt: skip
    found = secret_variables(variables)
    assert find_secrets("a plain-looking value", found) == ["the value of the environment variable SERVICE_TOKEN"]
    assert find_secrets("correct horse", found) == ["the value of the environment variable db_password"]
    assert find_secrets("admin:battery", found) == ["the value of the environment variable API_AUTH_STRING"]
    assert find_secrets("seven77", found) == []
    monkeypatch.setenv("SERVICE_TOKEN", "plain-looking")
    assert find_secrets("plain-looking") == ["the value of the environment variable SERVICE_TOKEN"]


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_text_that_holds_one_is_refused_with_field_and_line_and_without_the_secret(tmp_path, kind):
    assert find_secrets(f"source: ({SAMPLES[kind]})", {}) == [kind]
    path = tmp_path / "recipe.yaml"
    path.write_text(f"stages:\n  raw:\n    sources:\n      - repo: '{SAMPLES[kind]}'\n      - fine\n")
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    (problem,) = caught.value.problems
    assert problem.line == 4 and problem.message.startswith(f"stages.raw.sources.0.repo appears to contain {kind}")
    assert "environment variable" in problem.message and SAMPLES[kind] not in str(caught.value)


def test_a_key_that_is_a_secret_is_refused_too(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"stages:\n  {SAMPLES['a GitHub token']}: 1\n")
    with pytest.raises(ConfigError, match=r"yaml:2: stages appears to contain a GitHub token") as caught:
        read_document(path)
    assert SAMPLES["a GitHub token"] not in str(caught.value)


@pytest.mark.parametrize("override", ["raw.source.repo={}", "{}", "raw={}"])
def test_an_override_that_holds_one_is_refused_and_not_repeated(tmp_path, override):
    (tmp_path / "small.yaml").write_text("stages: {raw: {kind: prepare_data}}\n")
    with pytest.raises(ConfigError, match="appears to contain a Hugging Face token") as caught:
        load_recipe(tmp_path, "small", [override.format(SAMPLES["a Hugging Face token"])])
    assert SAMPLES["a Hugging Face token"] not in str(caught.value)
