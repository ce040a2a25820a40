"""Secrets to plant in scripts and files, each with the word canary in it, and what only looks like a secret."""

from __future__ import annotations

VARIABLES = {
    name: value.format(f"Canary{number}x7")
    for number, (name, value) in enumerate(
        {
            **dict.fromkeys(
                (
                    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "NEPTUNE_API_TOKEN", "DB_PASS", "SSHPASS"),
                    *("SMTP_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "REDIS_AUTH", "AZURE_STORAGE_SAS", "SENTRY_DSN"),
                    *(
                        "SESSION_COOKIE",
                        "SLACK_WEBHOOK_URL",
                        "AWS_ACCESS_KEY_ID",
                        "AWS_SECRET_ACCESS_KEY",
                        "GITHUB_PAT",
                    ),
                    *("CLIENT_SECRET", "LICENSE_KEY", "APIKEY", "wandbApiKey", "API_TOKEN_1", "DB_PASS_PROD", "KEY"),
                ),
                "{}",
            ),
            "http_proxy": "http://user:{}@proxy:3128",
            "DATABASE": "postgresql+psycopg2://me:{}@db.local/name",
            "REDIS": "redis://:{}@cache:6379/0",
            "GIT_REMOTE": "https://oauth2:{}@github.com/a/b.git",
            "CLONE_FROM": "https://ghp_abcdefghijklmnop{}@github.com/a/b.git",
            "CONTAINER": "https://a.blob.core.windows.net/data?sv=2022&sig={}",
            "ACCOUNT": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={}==",
            "EXTRA_HEADERS": "Authorization: Bearer {}0123456789",
            "NOTIFY": "https://hooks.slack.com/services/T0/B0/{}",
            "UPLOADER": "hf_abcdefghijklmnopqrst{}",
            "ASSISTANT": "sk-proj-0123456789{}",
            "CHAT": "xoxb-1234567890-{}",
            "ID_OF_AWS": "AKIAIOSFOD7CANARY901",
            "SESSION": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{}.abc",
            "TRACKER": '{{"wandb": {{"api_key": "{}"}}}}',
            "MORE_FLAGS": "--hub-token {}",
        }.items()
    )
}
"""Exported variables, of which all values are secrets."""

FLAGS = {
    "--wandb-api-key": "CanaryF1x7",
    "--hub-token": "CanaryF2x7",
    "--comet-apikey": "CanaryF3x7",
    "--s3-secret": "CanaryF4x7",
    "--data-url": "s3://key:CanaryF5x7@store/data",
    "--mlflow-uri": "https://user:CanaryF6x7@mlflow.local/x",
}
WORDS = ("--x-api-key=CanaryW1x7", "--db=postgresql://u:CanaryW2x7@h/d", "+logger.wandb.api_key=CanaryW3x7")

KEPT = {
    **dict.fromkeys(
        (
            *("PASSTHROUGH", "BYPASS_CACHE", "NUM_PASSES", "FORWARD_PASS", "KEY_VALUE_SIZE", "NCCL_IB_PKEY", "MONKEY"),
            *(
                "NCCL_SOCKET_KEY",
                "TOKENIZER",
                "TOKENIZER_PATH",
                "MAX_TOKENS",
                "TOKENS_PER_GPU",
                "TOKEN_COUNT",
                "AUTHORS",
            ),
            *("AUTH_TYPE", "PAD_TOKEN", "EOS_TOKEN", "TEXT_KEY", "JSON_KEYS", "DATASET_KEY", "SECRET_NAME", "COMPASS"),
            *(
                "COOKIE_DOMAIN",
                "HASH_KEY",
                "SASL_MECHANISM",
                "PATTERN",
                "KEYBOARD",
                "TURNKEY",
                "PASSES",
                "WEBHOOK_PORT",
            ),
        ),
        "visible",
    ),
    "TOKENIZERS_PARALLELISM": "false",
    "LANG": "C",
    "NCCL_DEBUG": "WARN",
    "OMP_NUM_THREADS": "8",
    "PASSWORD_FILE": "/run/secrets/password",
    "GOOGLE_APPLICATION_CREDENTIALS": "/etc/gcp.json",
    "SSH_KEY": "/home/me/.ssh/id_rsa",
    "USE_AUTH_TOKEN": "True",
    "REGISTRY": "https://registry.local:5000/@scope/image",
    "REMOTE": "git@github.com:a/b.git",
    "STORE": "postgresql://me@db.local/name",
    "COMMIT": "0123456789abcdef0123456789abcdef01234567",
}
"""Exported variables that a study keeps with their values."""

KEPT_FLAGS = {
    "--pad-token-id": "5",
    "--eos-token": "</s>",
    "--tokenizer-type": "HuggingFaceTokenizer",
    "--json-keys": "text",
    "--num-tokens": "1000000",
    "--max-tokens-per-gpu": "4096",
    "--attention-key-dim": "64",
    "--text-key": "content",
    "--token-file": "/etc/token",
    "--image-token": "<image>",
}
