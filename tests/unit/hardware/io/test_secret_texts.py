import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.io.errors import ConfigError
from hardware.io.secret_texts import hide, hide_words, is_secret, is_secret_name
from tests.support.studies.planted_secrets import FLAGS, KEPT, KEPT_FLAGS, VARIABLES, WORDS


def _words(text):
    return text.split()


SECRET = _words("""
    hub-token --x-api-key hub_token token accessToken ACCESSTOKEN HFToken clientSecret userPassword trainer.hub_token
    AZURE_STORAGE_SAS_TOKEN BLOB_SAS_URL AWS_SESSION_TOKEN SSH_PRIVATE_KEY AZURE_STORAGE_CONNECTION_STRING BASIC_AUTH
    DOCKER_PASSWORD PASSWORD_2 ENCRYPTION_KEY AZURE_ACCOUNT_KEY API_KEYS AUTH_HEADER HTTP_PROXY_PASS JWT VAULT_TOKEN
    KAGGLE_KEY MLFLOW_TRACKING_PASSWORD AWS_ACCESS_KEY_ID oauth
""")
HARMLESS = _words("""
    PWD OLDPWD SSH_AUTH_SOCK AWS_SHARED_CREDENTIALS_FILE --tokenizer-model --tokens --key --num-key-value-heads
    --kv-channels --moe-token-dispatcher-type --moe-token-drop-policy --calculate-per-token-loss --use-auth-token
    --mask-token --cls-token --fim-middle-token --mm-use-im-patch-token --special-tokens --linear-key-head-dim
    XAUTHORITY --query-key --bypass
    MULTI_PASS BACKWARD_PASS SASS ASSETS KEYMAP NUM_PASSES TOKEN_BUCKET COOKIE_NAME PASSWORD_LENGTH space.knobs.0.key
""")


@pytest.mark.parametrize("name", SECRET)
def test_names_of_secrets_are_told(name):
    """The words of a name say that it holds a secret, in any spelling."""
    assert is_secret_name(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_names_that_only_look_like_secrets_are_none(name):
    """Words about tokens of a text, keys of a mapping, passes of a network and places of secrets mean none."""
    assert not is_secret_name(name)


@pytest.mark.parametrize(("name", "value"), [*VARIABLES.items(), *FLAGS.items()])
def test_secrets_are_told(name, value):
    """A planted value is a secret by its name or its form, and is not shown beside its name or its flag."""
    assert is_secret(name, value)
    flag = f"--{name.lstrip('-')}"
    assert "canary" not in f"{hide_words([flag, value])} {hide_words([f'{flag}={value}'])}".lower()


@pytest.mark.parametrize(("name", "value"), [*KEPT.items(), *KEPT_FLAGS.items()])
def test_what_only_looks_like_a_secret_is_shown(name, value):
    """Neither name nor value hides anything, also as words of a command."""
    assert not is_secret(name, value)
    assert hide(f"{name}={value}") == f"{name}={value}"
    assert hide_words([f"--{name.lstrip('-')}", value])[1] == value


@pytest.mark.parametrize("word", WORDS)
def test_words_show_no_secret(word):
    """A word with a name and a secret keeps its name."""
    assert hide_words([word])[0].startswith(word.partition("=")[0])
    assert "Canary" not in hide_words([word])[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://u:p@ss@h/x and http://h:80/y", "see http://u:***@h/x and http://h:80/y"),
        ("{env:HF_TOKEN} HF_TOKEN=$HF_TOKEN API_KEY=${KEY}", "{env:HF_TOKEN} HF_TOKEN=$HF_TOKEN API_KEY=${KEY}"),
        ("must read key=value", "must read key=value"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----.", "***."),
        ("host=h password='a b' user=u", "host=h password='***' user=u"),
        ("hf_checkpoints sk-learn-like-names --hub-token (line 3): why", None),
    ],
)
def test_the_rest_of_a_text_stays(text, shown):
    """Only the secret is replaced; references to variables are none."""
    assert hide(text) == (shown or text)
    assert hide(hide(text)) == hide(text)


PARTS = st.sampled_from(
    [*" =:@/.-'\"{}$,;&?\n", "--", "://", "HF_TOKEN", "api_key", "http", "abc1", "sk-", "***", "Bearer"]
)


@given(st.lists(PARTS, max_size=12).map("".join))
def test_what_is_hidden_stays_hidden(text):
    """Any text can be read, and nothing more is hidden in what was hidden."""
    shown = hide(text)

    assert hide(shown) == shown
    assert len(hide_words(text.split())) == len(text.split())


@pytest.mark.parametrize(
    "part", ["http://", "http://a:", "sk-", "A" * 30 + "://", "x-", "--a ", "eyJaaaaaaaaaa.", '"a":']
)
def test_a_long_text_takes_no_time(part):
    """Time grows with the length of a text, not with its square: 50,000 characters take a fraction of a second."""
    begun_s = time.process_time()
    hide(part * (50_000 // len(part)))

    assert time.process_time() - begun_s < 5.0


def test_no_message_shows_a_secret():
    """A mistake is told without a value that its key or its form makes a secret."""
    for error in (
        ConfigError("is unknown", key="wandb.api_key", value="canary"),
        ConfigError("is unknown", key="a", value="hf_abcdefghijklmnopqrstcanary"),
        ConfigError("captured: train.py --x-api-key=canary"),
    ):
        assert "canary" not in str(error)
    assert "'a.b'" in str(ConfigError("is none", key="space.knobs.0.key", value="a.b"))
