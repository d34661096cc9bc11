"""Keys, tokens and passwords in what others read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.host import hiding

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
        ("--push-to https://me:pw@host hf_aB3dE6gH9", "--push-to https://me:(hidden)@host (hidden)"),
    ],
)
def test_arguments_of_a_script(words, shown):
    assert hiding.shown_arguments(words.split()) == shown.split()


def test_settings():
    assert hiding.shown_value("comet.api_key", "abc") == hiding.HIDDEN
    assert hiding.shown_value("data.tokens", 512) == 512
    assert hiding.shown_value("optimizer.type", "AdamW") == "AdamW"


HEX, MIXED = "3f9a1c7e5b2d8064" * 4, "aB3dE6gH9jK2mN5pQ8rS1tU4vW7xY0zA" * 4
CAPITALS = "Q7ZX3M9K2B5N8V4C6L1JHG0F"
ISSUED = [
    *(f"{prefix}{MIXED[:36]}" for prefix in (
        "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "gldt-", "glrt-", "glptt-", "npm_", "hf_",
        "sk-",
        "sk-proj-", "sk-ant-api03-", "sk-or-v1-", "sk_live_", "rk_live_", "sk_test_", "whsec_", "gsk_", "r8_", "xai-",
        "pplx-", "nvapi-", "dckr_pat_", "dckr_oat_", "dop_v1_", "pscale_tkn_", "tskey-auth-", "sntrys_", "glsa_",
        "glc_",
        "NRAK-", "PMAK-", "lsv2_pt_", "pcsk_", "wandb_v1_", "shpat_", "lin_api_", "figd_", "api_org_", "GOCSPX-",
        "ya29.", "hvs.", "xapp-1-", "AIzaSy", "pypi-AgEIcHlwaS5vcmcC", "sbp_", "rubygems_", "ATATT3xFfGF0", "dt0c01.",
    )),
    *(f"{prefix}{CAPITALS[:16]}" for prefix in ("AKIA", "ASIA", "ABIA", "LTAI")),
    *(f"{prefix}{HEX[:32]}" for prefix in ("dapi", "key-", "SK", "AC")),
    *(f"xox{kind}-2401-2401-{MIXED[:24]}" for kind in "bpars"),
    f"SG.{MIXED[:22]}.{MIXED[:43]}", f"{HEX[:32]}-us12", f"abc8Q~{MIXED[:32]}", f"110201543:AA{MIXED[:33]}",
    f"eyJ{MIXED[:20]}.eyJ{MIXED[:30]}.{MIXED[:43]}", f"M{MIXED[:23]}.{MIXED[:6]}.{MIXED[:27]}",
    f"{MIXED[:14]}.atlasv1.{MIXED[:60]}",
]  # fmt: skip
"""The forms of keys: of GitHub, GitLab, Hugging Face, OpenAI, Anthropic, Stripe, Slack, clouds, trackers and others."""


@pytest.mark.parametrize("key", ISSUED)
@pytest.mark.parametrize(
    "text", ["{}", "saw {}.", 'x="{}"', "/a/{}/b", "https://h/p/{}", "['--to', '{}']", "a:{},b"]
)
def test_a_key_by_its_form(key, text):
    shown = hiding.without_secrets(text.format(key))
    assert hiding.HIDDEN in shown and key[-12:] not in shown and key[4:16] not in shown


PASSWORD = "hunter3x"
WITH_PASSWORD = [
    "AWS_SECRET_ACCESS_KEY={}", "aws_secret_access_key = {}", "export AWS_SESSION_TOKEN={}", "secret_key={}", "KEY={}",
    "MY_KEY={} python x.py", "SIGNING_KEY='{}'", "ENCRYPTION_KEY: {}", "WANDB_API_KEY={}", "wandb.api_key: {}",
    "api-key: {}", "apiKey={}", "client_secret={}&a=1", "DB_PASSWORD={}", "MYSQL_PWD={}", "password={}", "passwd: {}",
    "passphrase = '{}'", '"password": "{}"', '"password": "{} er\\"5 {}"', "'password': '{} x'",
    "password: {}, user: me",
    '{{\\"password\\": \\"{}\\", \\"a\\": 1}}', '{{"request": {{"auth": {{"password": "{}"}}}}}}', "--password {}",
    "--password={} --lr 1", "['curl', '--password', '{}']", "--api-key {}", "Authorization: Bearer {}", "Pwd={};",
    "Authorization: Basic {} {}", "'Authorization': 'token {}'", "authorization={}",
    "Proxy-Authorization: Digest a={}, b={}",
    "Cookie: session={}; path={}", "https://{}@host/x", "https://me:{}@host", "postgresql://me:{}@db/x",
    "redis://:{}@h",
    "https://me:p@ss/{}@host", "https://h/x?sig={}", "https://h/x?a=1&X-Amz-Signature={}&b",
    "https://h/?access_token={}",
    "https://h/x?sv=1&signature={}#x", "AccountName=a;AccountKey={};EndpointSuffix=b", "curl -u me:{} https://h",
    "https://hooks.slack.com/services/T0/B0/{}", "SharedAccessKey={}", "token={}", "HF_TOKEN={}", "GITHUB_PAT={}",
    "AZURE_SAS={}", "SENTRY_DSN={}", '"HF_TOKEN": "{}"', "CREDENTIALS={}", "WEBHOOK_KEY={}",
    "machine h login me password {}",
    "KeyError in env: SECRET={}", "a.b.password={}",
    "password=${}", "TOKEN_VALUE={}", "SECRET_VALUE: {}",
    "--wandb-token {}", "REDIS_PASS={}", "http_auth={}",
    "-----BEGIN RSA PRIVATE KEY-----\nMII{}\n{}\n-----END RSA PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\\n{}",
]  # fmt: skip


@pytest.mark.parametrize("text", WITH_PASSWORD)
@pytest.mark.parametrize("password", [PASSWORD, "correcthorsebattery", "p%w+r/d==", "aB3dE6gH9jK2mN5p"])
def test_a_password_by_its_place(text, password):
    if text.startswith("https://{}"):
        password = password.replace("/", "%2F")
    text = text.replace("{{", "{").replace("}}", "}").replace("{}", password)
    shown = hiding.without_secrets(text)
    assert hiding.HIDDEN in shown and password not in shown


@pytest.mark.parametrize("text", ["Bearer {}", "sent Bearer {} to h", "bearer {}"])
def test_a_bearers_token_without_a_header(text):
    assert MIXED[:32] not in hiding.without_secrets(text.format(MIXED[:32]))


def test_a_users_password_in_base64():
    assert hiding.without_secrets("sent Basic dXNlcjpwYXNz to it") == "sent Basic (hidden) to it"


READABLE = [
    "tokens: 11,636", "2 tokens = 4096.", "token: 12345", "max_tokens=2048 --max-new-tokens 512",
    "tokenizer.pad_token = tokenizer.eos_token", "pad_token_id=151643, eos_token: <|im_end|>", "bos_token='<s>'",
    "tokens_per_second: 12345.6", "tokens per batch: 16384", "num_key_value_heads=8, key_padding_mask=None",
    "KeyError: 'model.layers.0.self_attn.q_proj.weight'", "Missing key(s) in state_dict: \"lm_head.weight\".",
    "Unexpected key: model.embed_tokens.weight", "past_key_values=DynamicCache()",
    "sorted(rows, key=lambda row: row.n)",
    "sort(key=itemgetter)", "cache_key=3f9a1c7e5b2d8064", "state_dict_key: optimizer_states", "key: value", "key=loss",
    "token = next(stream)", "if token == '>':", "password=None, api_key=None", "password: str | None = None",
    "api_key=os.environ['API_KEY']", "token=${HF_TOKEN}", "secret: <redacted>", "authors: me", "auth: none",
    "sha256:" + HEX, "sha256=" + HEX, "commit " + HEX[:40], "revision=" + HEX[:40], "etag: " + HEX[:32], HEX,
    "md5 " + HEX[:32],
    "models--Qwen--Qwen2.5-7B-Instruct/snapshots/" + HEX[:40] + "/model-00001-of-00004.safetensors",
    "/home/me/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B/blobs/" + HEX, "https://h:80/a@b see x@y",
    "hf_quantizer.preprocess_model", "hf_deepspeed_config", "hf_mixtral8x7b", "HF_ENDPOINT and HF_DATASETS_CACHE",
    "sk-learn-contrib", "scikit-learn", "npm_config_registry", "fw_forward_pass", "secret_santa", "AC adapter",
    "SKIPPED",
    "basic configuration of Bearer authentication", "Basic optimizer", "Bearer token is missing", "bypass=true",
    "[rank0]: File \"/a/b/train.py\", line 12, in main", "tcp://10.0.0.1:29500", "http://h:8080/a?b=c&page=2",
    "user@host:path",
    "NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE", "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8",
    "_ZN2at6native18elementwise_kernelILi128ELi4EZNS0_22gpu_kernel_impl_nocastE", "step 12 loss 6.039 lr 3e-05",
    "2026-11-23 19:00:01,123 INFO: 8192 tokens/s", "special_tokens_map.json", "added_tokens={'<pad>': 1}",
    "monkey=banana1",
    "Qwen2_5_VLForConditionalGeneration", "UUID GPU-8d3f1c7e-5b2d-8064-aaaa-3f9a1c7e5b2d", "compass: north",
    "keyboard: us",
    "TOKENIZERS_PARALLELISM=false", "NCCL_IB_PKEY=0x8001", "KeyboardInterrupt:", "author=Jane",
    "key_proj.weight: [64, 64]",
    "run-20261123_190001-a1b2c3d4", "torchrun --nnodes 2 --rdzv_id job1", "passed: 12, failed: 0", "pass: 3",
    "Pass 2 of 3:",
    "token: '</s>'", "Expected token: 'end of block'", "pad_token=0, max_token = many", "HF_TOKEN is not set",
    "set HF_TOKEN or run huggingface-cli login", "No API key configured. Use wandb login", "api_key: required",
    "--token-file /etc/x --lr 0.1", "PWD=/home/me", "OLDPWD=/", "pwd: /home/me/runs", "the secret of training",
]  # fmt: skip


@pytest.mark.parametrize("text", READABLE)
def test_lines_of_logs_stay_readable(text):
    assert hiding.without_secrets(text) == text


def test_a_key_is_hidden_as_a_whole():
    line = '{"user": "me", "password": "a \\"b\\" c", "lr": 0.1}'
    assert hiding.without_secrets(line) == '{"user": "me", "password": "(hidden)", "lr": 0.1}'


def test_names_within_values():
    settings = {"tracker": {"api_key": "abc", "urls": ["https://me:pw@h"]}, "lr": 0.1}
    assert hiding.shown_value("", settings) == {
        "tracker": {"api_key": hiding.HIDDEN, "urls": ["https://me:(hidden)@h"]}, "lr": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000, "key=" * 50_000, '"key": "' + "\\" * 100_000, "password=" + "x" * 200_000, "-" * 100_000,
        "eyJ" * 60_000, "http://a:" * 20_000, "a.b-c_" * 30_000, "--password " * 20_000, "sk-" * 60_000,
        "Basic " * 30_000,
        "-----BEGIN PRIVATE KEY-----" * 5_000, '\\"' * 80_000, "token" * 40_000, "AB_" * 60_000 + "KEY=x",
    ],
)  # fmt: skip
def test_texts_made_against_the_patterns_end(text):
    """Each ends within seconds: time grows with the length alone."""
    hiding.without_secrets(text)


@pytest.mark.parametrize(
    "text", ["token=abcdefg", "api_key: 'x9f3k2'", "password: 12345abc", "authorization: Bearer 99887766aa"]
)
def test_what_a_name_marks_in_a_text(text):
    assert hiding.HIDDEN in hiding.without_secrets(text)
