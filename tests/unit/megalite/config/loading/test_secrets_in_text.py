"""What counts as a secret, by its value or by the name of a variable; a false alarm would refuse a good config."""

from __future__ import annotations

import pytest

from megalite.config.loading.secrets_in_text import names_secret, secret_in

SECRETS = {
    "hf_" + "aB3" * 11: "a Hugging Face token",
    "ghp_secret": "a GitHub token",
    "github_pat_11AAAAAAA0": "a GitHub token",
    "https://ghp_SECRET@host/x": "a GitHub token",
    "AKIAIOSFODNN7EXAMPLE": "an AWS access key",
    "xoxb-1234-abcd": "a Slack token",
    "https://hooks.slack.com/services/T0/B0/XXXX": "the address of a webhook",
    "eyJhbGciOiJIUzI1NiJ9.e30.abc": "a signed token (JWT)",
    "Bearer abcdefghijk": "an authorization header",
    "Basic dXNlcjpodW50ZXIy": "an authorization header",
    "authorization: Basic plainword": "an authorization header",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k==": "the key of a storage account",
    "https://a.blob/x?sv=1&sig=abc": "a signed address",
    "https://bucket/y?X-Amz-Signature=abc": "a signed address",
    "http://user:p%40ss@proxy:3128": "an address with a password",
    "socks5://u:pa/ss@proxy:1": "an address with a password",
    "simplecache::https://u:word@host/x": "an address with a password",
    "s3://KEY:word@bucket/x": "an address with a password",
    "https://plainword@host/x": "an address with a token",
    "user:hunter2@proxy.corp:3128": "a user's name and password",
    "proxy=user:hunter2@proxy": "a user's name and password",
    "host=db;Password=hunter2": "a password",
    "https://host/x?access_token=abcdef": "a password",
    "access_token=12345678901234567890": "a password",
    "access_token=1234abcdef": "a password",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3": "a private key",
}
ORDINARY = [
    *("/home/u/runs/hf_export_of_the_first_model", "meta-llama/Llama-3.1-8B", "models--organisation--name@main"),
    *("http://proxy:3128", "http://host:80/path@v1", "https://host:8080/a?b=c", "s3://bucket/x"),
    *("abfs://container@account.dfs.core.windows.net/x", "sftp://user@host/x", "hdfs://user@host:9000/x"),
    *("git@github.com:organisation/name", "image:1.2@sha256:deadbeef", "node1:0,1@node2:0,1", "worker:8080"),
    *("[::1]:80", "mlx5_0:1,mlx5_1:1", "^docker0,lo"),
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184",
    *("2026-01-23T10:13:43", "A key=value pair", "basic training", "basic transformer", "Basic Language-Model"),
    *("the basic baseline-7", "Basic Transformer-Large-v2", "/data/basic experiments/a", "max_token=4096"),
    *("max_token=4096-cosine", "lr:3e-4@cosine", "schedule:cosine@run2"),
    "sftp://mystorage01.checkpoints.trainer@mystorage01.blob.core.windows.net/x",
]


@pytest.mark.parametrize("value", SECRETS)
def test_a_value_that_is_a_secret(value: str) -> None:
    assert secret_in(value) == SECRETS[value]


@pytest.mark.parametrize("value", ORDINARY)
def test_an_ordinary_value(value: str) -> None:
    assert secret_in(value) is None


def test_names_of_variables() -> None:
    secret = (
        "HF_TOKEN HF_TOKEN1 HF_TOKENS HF_TOKEN_V2 HF_ACCESSTOKEN WANDB_API_KEY WANDB_APIKEY2 AWS_MYAPIKEYVALUE HF_PAT "
        "GITHUB_PAT HF_JWT HUGGINGFACE_BEARER MEGALITE_COOKIE AWS_SESSION S3_PASSPHRASE SLACK_WEBHOOK_URL AZURE_CONN "
        "AWS_CONTAINER_AUTHORIZATION AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_SAS GOOGLE_APPLICATION_CREDENTIALS"
    )
    plain = "NCCL_DEBUG TOKENIZERS_PARALLELISM PATH AUTHOR COMPAT PATTERN KEYBOARD UCX_CONNECT WANDB_MODE HF_HUB_PATH"
    assert [name for name in secret.split() if not names_secret(name)] == []
    assert [name for name in plain.split() if names_secret(name)] == []
