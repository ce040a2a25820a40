"""What a secret is: the words of a name, the form of a value, and their places in texts and commands.

A name is cut into words at `_`, `-`, `.` and where camel case begins a word. Some words always mean a secret
(`password`), and some only as the last word, where the word before does not say otherwise: `HF_TOKEN`, but neither
`PAD_TOKEN` nor `TOKEN_DISPATCHER`. A value is a secret by itself if it is a URL with a password, or has the form that a
service gives to its keys. Rather too much is a secret than too little, except for what training programs are known to
be given.

Nothing tells a secret that has neither: the value of `-p`, or a password in the middle of a word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HIDDEN = "***"
"""Text in the place of a secret."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ALWAYS = _set(
    """
    secret secrets password passwords passwd passphrase passcode pwd psk credential credentials cred
    creds authorization bearer jwt dsn sas cookie cookies webhook webhooks
    """
)
"""Words that mean a secret wherever they stand in a name."""

_JOINED = (
    r".*(password|passwd|passphrase|secret|credentials|webhook|webhookurl|connectionstring"
    r"|(api|access|secret|private|account|wandb)keys?|(access|auth|api|hf|hub|bearer|git|github)token|(ssh|db|user)pass)"
)
"""Ends of words that mean a secret where a name does not separate its words."""

_AT_THE_END = _set(
    """
    token key pass auth oauth pat
    """
)
"""Words that mean a secret as the last word of a name, unless the word before belongs to something else."""

_PHRASES = frozenset(
    {
        *(("api", "keys"), ("access", "keys"), ("secret", "keys"), ("private", "keys"), ("access", "tokens")),
        *(("api", "tokens"), ("auth", "tokens"), ("connection", "string"), ("conn", "str"), ("connection", "str")),
        *(("auth", "header"), ("auth", "config")),
    }
)
"""Ends of names that mean a secret."""

_KEY_IDS = (["access", "key", "id"], ["api", "key", "id"])
"""Ends of names of the other half of a secret, which belongs no more into a file."""

_ENDINGS = _set(
    """
    value text str string hex b64 base64 read write ro rw prod dev test staging new old backup primary
    secondary main default
    """
)
"""Last words that leave the meaning to the word before them."""

_ABOUT = _set(
    """
    file files path paths dir dirs directory folder sock socket name names type kind method mode length
    len size count enabled required expiry ttl timeout interval policy port domain provider manager
    helper prompt min max store
    """
)
"""Last words of names that are about a secret and hold none."""

_SWITCHES = _set(
    """
    use no enable disable with without has is skip require allow num
    """
)
"""First words of names that are switches or numbers."""

_LIBRARIES = _set(
    """
    nccl rccl hccl ucx cuda omp mkl gloo xla ascend
    """
)
"""First words of variables of libraries that know no accounts."""

_OWNERS = {
    "token": _set(
        """
    pad padding middle eos bos sos eod eot eom unk unknown sep separator cls mask fim begin end image
    img patch video vid audio vision visual frame speech special placeholder start stop first last next
    prev new extra per every each by multi think thinking prefix suffix byte char word sub query cross
    one single class latent register decoder encoder action loss drop max min n bot text newline target
    box point region state reward value
    """
    ),
    "key": _set(
        """
    text json data dataset sort label labels image images input output column feature features primary
    foreign group cache dict map config query attention attn per row partition index state metric target
    source prompt response chosen rejected answer question message messages conversation caption cross
    kv public hot monitor watch best reward value load checkpoint ckpt param params module layer tool
    tools doc document reasoning chat role content tag sample example video audio weight weights
    optimizer loss step batch by qk system instruction context field item vocab tokenizer tokens knob
    knobs id ids hash dedup mask linear embedding sequence seq template split
    """
    ),
    "pass": _set(
        """
    forward backward fwd bwd fw bw one two single multi first second last by per num max min n warmup
    each every pre post optimizer step low high band train eval fusion compiler graph
    """
    ),
    "auth": _set(
        """
    mpi munge no slurm
    """
    ),
}
"""Words before a word of `_AT_THE_END` that take the meaning of a secret from it."""

_NO_VALUES = frozenset({"", "true", "false", "yes", "no", "on", "off", "none", "null", "0", "1", "...", HIDDEN})

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NUMBER = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", re.I)
_FILE = re.compile(r"(/|~/|\./|\.\./)[\w./-]*[\w-]")
"""Path of a file; of a key or of credentials, it is the place of a secret and not the secret."""
_OF_FILES = frozenset({"credentials", "credential", "creds", "cred", "key", "cookie", "cookies", "auth"})

_REFERENCE = re.compile(r"\$\w+|\$\{\w+\}|\{env:\w+\}|\{\w+\}|\*\*\*[0-9a-f]{0,16}")
"""Text that stands for a value elsewhere: a variable of a shell, a placeholder, or what was hidden already."""

_FORMS = r"""
    (?P<before>
        # a password of a URL, and no port
        (?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s/@:'"]{0,200}:(?=[^\s@]{0,300}@)(?!\d{1,5}(/|$))
        | (?i:\b(bearer|basic)\s+)(?=[\w.~+/=-]{16})(?=\S{0,300}\d)
        | (?i:(?<![\w-])(proxy-)?authorization\s*[:=]\s*((bearer|basic|token)\s+)?)
        | (?i:(?<![\w-])(set-)?cookie\s*:\s*)
        | (?i:[?&;](sig|signature|x-amz-signature|x-amz-credential|x-goog-signature)=)
        | (?i:https?://hooks\.slack\.com/(services|workflows|triggers)/)
        | (?i:https?://([\w-]+\.)?discord(app)?\.com/api/webhooks/)
        | (?i:https?://[\w.-]{1,100}\.webhook\.office\.com/)
        | (?i:https?://[\w.-]{1,100}/[\w./-]{0,100}hooks?/(send\?key=)?)(?=[\w-]{0,100}\d)(?=[\w-]{8})
        | (?i:(git\+)?https?://)(?=[\w.~%-]{16,300}@)  # a token in the place of a user
    )
    (?P<value>(?<=:)[^\s'"]{1,300}(?=@) | [^\s'"@;&,]+ )
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|$)
    | (?<![A-Za-z0-9])(
        hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,} | wandb_v1_\w{16,}
        | (sk|rk|pk)(-|_(live|test)_)(?=[\w-]{0,100}\d)[\w-]{16,} | nvapi-[\w-]{20,} | gsk_\w{20,} | r8_\w{20,}
        | gh[opusr]_[A-Za-z0-9]{16,} | github_pat_\w{20,} | glpat-[\w-]{16,} | gl[a-z]{2,4}-(?=[\w-]{0,100}\d)[\w-]{20,}
        | (AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16} | AIza[\w-]{30,} | ya29\.[\w-]{20,}
        | xox[a-z]-[\w-]{10,} | xapp-[\w-]{10,} | SG\.[\w-]{16,100}\.[\w-]{16,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,}
        | dckr_pat_[\w-]{16,} | dop_v1_\w{30,} | hv[sb]\.[\w-]{20,} | eyJ[\w-]{10,2000}\.[\w-]{10,4000}\.[\w-]*
      )
    """
"""Values that are secrets by their form, after a text that shows them."""

_PAIR = r"""(?<![\w.-])(?P<dashes>-{0,2})(?P<name>[A-Za-z_][\w.-]{0,100})
    (?P<sign>:?=|:-|\\?["']\s{0,3}:\s{0,3}(?=[\\"'0-9A-Za-z]))
    (?P<quote>\\?["']?)
    (?P<value>(?<=")[^"]+|(?<=')[^']+|\$\{\w+\}|\{[\w:]+\}|[^\s"'`;&,)}\]]+)"""
"""A name with its value: `NAME=VALUE`, or a key of JSON."""

_NAMED_WORD = re.compile(r"(?P<before>[-+~]*(?P<name>[A-Za-z_][\w./@-]*)=)(?P<value>.*)", re.S)
_FLAG = re.compile(r"--?(?P<name>[A-Za-z][\w.-]+)")


def is_secret_name(name: str) -> bool:
    """Return whether a variable, flag or key of that name holds a secret."""
    words = _words(name)
    if not words or words in (["pwd"], ["oldpwd"], ["old", "pwd"]):  # a shell's working directory
        return False
    last = words[-1]
    if last in _ABOUT:
        return False
    always = bool(_ALWAYS & set(words)) or any(re.fullmatch(_JOINED, word) for word in words)
    return always or tuple(words[-2:]) in _PHRASES or words[-3:] in _KEY_IDS or _ends_in_secret(words, name)


def _ends_in_secret(words: Sequence[str], name: str) -> bool:
    """Return whether the last word of a name means a secret there."""
    *before, last = words
    if before and last in _ENDINGS:
        *before, last = before
    if last not in _AT_THE_END or words[0] in _SWITCHES | _LIBRARIES:
        return False
    if not before:
        return last != "key" or name.isupper()  # in small letters, it is the key of any mapping
    return before[-1] not in _OWNERS.get(last, ()) and not (last == "key" and before[-1].isdigit())


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case, without numbers at its end."""
    words = [word.lower() for part in re.split(r"[^A-Za-z0-9]+", name) for word in _CAMEL.split(part) if word]
    words = [re.sub(r"(?<=[a-z]{3})[0-9]+$", "", word) for word in words]
    while len(words) > 1 and words[-1].isdigit():
        words.pop()
    return words


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of a variable, flag or key is a secret, by its name or by itself."""
    return is_named_secret(name, value) or holds_secret(value)


def is_named_secret(name: str, value: str) -> bool:
    """Return whether a name says that its value is a secret, and the value is no switch, number of tokens or file."""
    if not is_secret_name(name):
        return False
    text = value.strip().strip("'\"")
    words = set(_words(name))
    if text.lower() in _NO_VALUES or _REFERENCE.fullmatch(text):
        return False
    if not words & _ALWAYS and "pass" not in words and _NUMBER.fullmatch(text):
        return False
    return not (words & _OF_FILES and not words & {"secret", "account"} and _FILE.fullmatch(text))


def holds_secret(text: str) -> bool:
    """Return whether a text, which may be a command, shows a secret."""
    words = text.split()
    return hide(text) != text or (len(words) > 1 and bool(secret_words(words)))


def hide(text: str) -> str:
    """Return the text with `***` for everything in it that is a secret by its form, or by a name before it."""
    # compiled when first used: a quick command would take a tenth longer
    shown = re.sub(_FORMS, _hide_form, text, flags=re.X | re.S)
    return re.sub(_PAIR, _hide_pair, shown, flags=re.X)


def hide_command(text: str) -> str:
    """Return the text of a command with `***` also for the secrets of its flags."""
    return " ".join(hide_words(text.split())) if holds_secret(text) else text


def _hide_form(match: re.Match[str]) -> str:
    value = match["value"]
    if value is None:
        return HIDDEN
    return match[0] if _REFERENCE.fullmatch(value) else f"{match['before']}{HIDDEN}"


def _hide_pair(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if not is_named_secret(name, value):
        return match[0]
    return f"{match['dashes']}{name}{match['sign']}{match['quote']}{HIDDEN}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretWord:
    """Word of a command that shows a secret.

    Attributes:
        at: Position of the word.
        before: Part of the word before the secret value, such as `--hub-token=`.
        name: Name of the flag or variable whose value it is; empty if there is none.
        value: The value that holds the secret.
    """

    at: int
    before: str
    name: str
    value: str


def secret_words(words: Sequence[str]) -> list[SecretWord]:
    """Return the words of a command that show a secret, by a flag's name or by themselves."""
    found = []
    flag = ""
    for at, word in enumerate(words):
        if (match := _NAMED_WORD.fullmatch(word)) is not None:
            if is_secret(match["name"], match["value"]):
                found.append(SecretWord(at=at, before=match["before"], name=match["name"], value=match["value"]))
            flag = ""
        elif word.startswith("-") and not holds_secret(word):
            match = _FLAG.fullmatch(word)
            flag = match["name"] if match else ""
        else:
            if is_secret(flag, word):
                found.append(SecretWord(at=at, before="", name=flag, value=word))
            # only the name of several secrets has several words behind it
            flag = flag if flag.lower().endswith("s") else ""
    return found


def hide_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command with `***` for each secret value."""
    shown = list(words)
    for secret in secret_words(shown):
        hidden = hide(secret.value)
        is_whole = is_secret_name(secret.name) or hidden == secret.value
        shown[secret.at] = secret.before + (HIDDEN if is_whole else hidden)
    return shown


def digest_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command with a digest of each secret value, which tells two of them apart."""
    shown = list(words)
    for secret in secret_words(shown):
        digest = hashlib.sha256(f"{secret.name}={secret.value}".encode()).hexdigest()[:16]
        shown[secret.at] = f"{secret.before}{HIDDEN}{digest}"
    return shown
