"""Keys, tokens and passwords in what others read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun import hiding

SECRET = [
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
    "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "GITHUB_PAT", "HF_TOKEN2",
    "token", "hfToken", "apiKey", "MYSQL_PWD", "MYSQL_PASS", "PGPASSWORD", "SSHPASS",
    "GOOGLE_APPLICATION_CREDENTIALS", "CREDENTIAL", "HTTP_AUTH", "SECRET", "MY_SECRETS", "COMET_API_KEY",
    "NEPTUNE_API_TOKEN", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_SAS", "SENTRY_DSN", "KEY",
    "PRIVATE_KEY", "GPG_PASSPHRASE", "APIKEY", "REDIS_PASSWD", "SWANLAB_API_KEY", "OAUTH_CLIENT_SECRET",
]  # fmt: skip
OPEN = [
    "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "MONKEY_BUSINESS", "NCCL_IB_PKEY", "NCCL_PAT_ENABLE",
    "PWD", "OLDPWD", "PATH", "PYTHONPATH", "ACCELERATE_BYPASS_DEVICE_MAP", "HF_HOME", "HF_ENDPOINT",
    "WANDB_PROJECT", "MAX_TOKENS", "AUTHOR", "XAUTHORITY", "COMPASS", "PASSIVE", "HOTKEY", "SECRETARY",
    "MLFLOW_TRACKING_USERNAME", "UCX_IB_PKEY", "CUDA_HOME",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_by_its_name(name):
    assert hiding.is_secret(name)
    assert hiding.shown({name: "hf_abcdefgh"}) == {name: "(hidden)"}
    assert hiding.secrets({name: "hf_abcdefgh"}) == {name}


@pytest.mark.parametrize("name", OPEN)
def test_no_secret(name):
    assert not hiding.is_secret(name)
    assert hiding.shown({name: "x:1"}) == {name: "x:1"}


@pytest.mark.parametrize("value", ["", "0", "1", "true", "No", "OFF"])
def test_a_switch_is_no_secret(value):
    env = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": value}
    assert hiding.shown(env) == env
    assert not hiding.secrets(env)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("http_proxy", "http://user:pw@proxy:3128", "http://user:(hidden)@proxy:3128"),
        ("HTTPS_PROXY", "user:pw@proxy:3128", "user:(hidden)@proxy:3128"),
        ("https_proxy", "http://user:p@ss/w:d@proxy", "http://user:(hidden)@proxy"),
        ("MLFLOW_TRACKING_URI", "postgresql+psycopg2://me:pw@db/runs", "postgresql+psycopg2://me:(hidden)@db/runs"),
        ("UCX_X", "redis://:pw@h", "redis://:(hidden)@h"),
        ("HF_ENDPOINT", "https://ghp_abc@mirror/x", "https://(hidden)@mirror/x"),
        ("HF_ENDPOINT", "https://m/x?a=1&api_key=abc&b=2", "https://m/x?a=1&api_key=(hidden)&b=2"),
        ("HF_ENDPOINT", "see https://a:b@c and https://d", "see https://a:(hidden)@c and https://d"),
    ],
)  # fmt: skip
def test_a_password_in_a_value(name, value, shown):
    assert hiding.shown({name: value}) == {name: shown}
    assert hiding.secrets({name: value}) == {name}


@pytest.mark.parametrize(
    "value",
    [
        "https://hf-mirror.com",
        "http://proxy:3128",
        "http://h:80/a@b",
        "a:b",
        "tcp://10.0.0.1:29500",
        "/a:/b",
        "x@y",
    ],
)
def test_a_value_that_stays_as_it_is(value):
    assert hiding.shown({"HF_ENDPOINT": value, "http_proxy": value}) == {
        "HF_ENDPOINT": value,
        "http_proxy": value,
    }


def test_long_values_take_no_time():
    for text in ("a" * 131072, "http://" * 18000, "?a" * 65000, "http://a:" * 14000, "user:" * 26000):
        hiding.shown({"http_proxy": text, "HF_X": text})


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_what_is_shown_has_the_same_names(env):
    assert hiding.shown(env).keys() == env.keys()
    assert hiding.secrets(env) == {name for name in env if hiding.shown(env)[name] != env[name]}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--api-key abc --lr 0.1", "--api-key (hidden) --lr 0.1"),
        ("--wandb_token=abc --max-tokens=2048", "--wandb_token=(hidden) --max-tokens=2048"),
        ("api_key=abc --resume", "api_key=(hidden) --resume"),
        ("--push-to https://me:pw@host hf_abcdefgh12", "--push-to https://me:(hidden)@host (hidden)"),
    ],
)
def test_arguments_of_a_script(words, shown):
    assert hiding.shown_arguments(words.split()) == shown.split()


def test_settings():
    assert hiding.shown_value("comet.api_key", "abc") == hiding.HIDDEN
    assert hiding.shown_value("data.tokens", 512) == 512
    assert hiding.shown_value("optimizer.type", "AdamW") == "AdamW"


@pytest.mark.parametrize("text", ["tokens: 11,636", "2 tokens = 4096.", "token: 12345"])
def test_a_number_is_no_key(text):
    assert hiding.without_secrets(text) == text


@pytest.mark.parametrize(
    "text", ["token=abcdefg", "api_key: 'x9f3k2'", "password: 12345abc", "authorization: Bearer 99887766aa"]
)
def test_what_a_name_marks_in_a_text(text):
    assert hiding.HIDDEN in hiding.without_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokenizer.pad_token = tokenizer.eos_token",
        "pad_token='<|endoftext|>'",
        "Expected token: 'end of block'",
        "HF_ENDPOINT and HF_DATASETS_CACHE",
        "pad_token=0, max_token = many",
    ],
)
def test_tokens_of_texts_are_no_secrets(text):
    assert hiding.without_secrets(text) == text
