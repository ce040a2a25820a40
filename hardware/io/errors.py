"""Exception for mistakes of users, and helpers that print values in its messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from hardware.io.secret_texts import HIDDEN, hide, is_named_secret


class ConfigError(Exception):
    """Error for a value that a user gave and that cannot work.

    The message names the file, the key, the value, the rule that it breaks and the nearest valid choice, as far as each
    is known. The command line prints it without a traceback and ends with status 2. If there are several problems, the
    further lines `listed` name each.
    """

    def __init__(
        self,
        rule: str,
        *,
        key: str | None = None,
        value: object = None,
        nearest: str | None = None,
        file: str | None = None,
        listed: tuple[str, ...] = (),
    ) -> None:
        super().__init__(rule)
        self.rule = rule
        self.key = key
        self.value = value
        self.nearest = nearest
        self.file = file
        self.listed = listed

    def in_file(self, file: str) -> ConfigError:
        """Return this error with the name of its file, unless one was named already."""
        return ConfigError(
            self.rule, key=self.key, value=self.value, nearest=self.nearest, file=self.file or file, listed=self.listed
        )

    def under(self, prefix: str) -> ConfigError:
        """Return this error for the mapping that holds the value under `prefix`."""
        key = prefix if self.key is None else f"{prefix}.{self.key}"
        return ConfigError(self.rule, key=key, value=self.value, nearest=self.nearest, file=self.file)

    def __str__(self) -> str:
        parts = [shorten(self.file, 1_000)] if self.file else []
        if self.key is not None:
            key = shorten(self.key, 200)
            value = HIDDEN if is_named_secret(self.key, str(self.value)) else quote_value(self.value)
            parts.append(key if self.value is None else f"{key} = {value}")
        parts.append(shorten(hide(self.rule), 1_500))
        sentence = ": ".join(parts)
        return f"{sentence}; {shorten(self.nearest, 1_500)}" if self.nearest else sentence


class UnknownNameError(ConfigError):
    """Error for a name that no catalog has; a name whose own file cannot work is no unknown one."""


def quote_value(value: object, limit: int = 120) -> str:
    """Print a value for messages: text is quoted, secrets are hidden, at most `limit` characters remain."""
    return shorten(hide(shown_url(repr(value))), limit)


def shorten(text: str, limit: int) -> str:
    """Cut a text to at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown_url(url: str) -> str:
    """Return the URL without its password, for messages and results."""
    # greedy: a password may hold an unescaped @ or :, and rather too much is hidden than too little
    hidden = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&](?:password|passfile|sslpassword)=)[^&]*", r"\1***", hidden)


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Suggest the valid name closest to a wrong one, and list all valid names if they are few."""
    known = sorted(choices)
    close = difflib.get_close_matches(str(name).lower(), [choice.lower() for choice in known], n=1, cutoff=0.5)
    nearest = next((choice for choice in known if close and choice.lower() == close[0]), None)
    listed = f"valid: {', '.join(known)}" if len(known) <= 40 else f"{len(known)} names are valid"
    return f"did you mean {nearest!r}? ({listed})" if nearest else listed
