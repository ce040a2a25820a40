"""An imported configuration without the secrets of its script.

A secret in the command or its environment becomes `{env:NAME}`, a variable that must be set where `meshtune run` is
started: the command works as before, and the study file can be shown to anybody. A variable that has the same value in
the script gives the name. Everything else that is told of the script has `***` in place of its secrets.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hardware.io.secret_texts import HIDDEN, SecretWord, hide, hide_command, holds_secret, is_secret, secret_words
from tuner.imports.imported import Imported, LaunchCommand

_SHORTEST = 6
"""Length from which a secret value is hidden wherever it occurs: a shorter one is a part of other words."""


def without_secrets(imported: Imported) -> Imported:
    """Return the configuration with no secret of its script in it."""
    values: list[str] = []
    command = imported.command
    if command is not None:
        command, values = _without(command)

    def clean(text: str) -> str:
        for value in values:
            text = _replace_whole(value, HIDDEN, text)
        return hide(text)

    if command is not None:
        command = replace(
            command,
            unknown=tuple(map(clean, command.unknown)),
            left_out=tuple(map(clean, command.left_out)),
            directory=clean(command.directory),
            moves=clean(hide_command(command.moves)),
        )
    return replace(
        imported,
        command=command,
        missing={name: clean(why) for name, why in imported.missing.items()},
        open={name: clean(why) for name, why in imported.open.items()},
        origins={name: clean(flag) for name, flag in imported.origins.items()},
        unread=tuple(replace(one, what=clean(hide_command(one.what)), why=clean(one.why)) for one in imported.unread),
        doubts=tuple(replace(one, flag=clean(one.flag), why=clean(one.why)) for one in imported.doubts),
        notes=tuple(map(clean, imported.notes)),
    )


def _without(command: LaunchCommand) -> tuple[LaunchCommand, list[str]]:
    """Return the command with variables in place of its secrets, and the values that it had, the longest first."""
    variables = _Variables(command)
    environment = {name: variables.of_environment(name, value) for name, value in command.environment}
    arguments, words = list(command.arguments), list(command.words)
    for texts in (arguments, words):
        for secret in secret_words(texts):
            texts[secret.at] = secret.before + variables.of_word(secret)
    slurm = command.slurm and replace(
        command.slurm,
        sbatch=tuple(map(variables.of_export, command.slurm.sbatch)),
        srun=tuple(map(variables.of_export, command.slurm.srun)),
    )
    # a secret may be a part of other words too, or the value of a variable whose name does not tell
    environment = {name: variables.everywhere(value, name) for name, value in environment.items()}
    arguments, words = (list(map(variables.everywhere, texts)) for texts in (arguments, words))
    hidden = variables.texts()
    options = (*slurm.sbatch, *slurm.srun) if slurm else ()
    changed = replace(
        command,
        arguments=tuple(arguments),
        words=tuple(words),
        environment=tuple(environment.items()),
        slurm=slurm,
        variables=tuple(variables.values),
        shows_secret=any(
            holds_secret(option) or any(_replace_whole(text, "", option) != option for text in hidden)
            for option in options
        ),
    )
    return changed, hidden


class _Variables:
    """Variables that stand for the secrets of one command, with the values that they had in its script."""

    def __init__(self, command: LaunchCommand) -> None:
        self.values: dict[str, str] = {}
        self._exported = dict(command.environment)

    def of_environment(self, name: str, value: str) -> str:
        """Return the value of an exported variable, or the placeholder of its secret."""
        if not is_secret(name, _unescaped(value)):
            return value
        self.values[name] = value
        return f"{{env:{name}}}"

    def of_word(self, secret: SecretWord) -> str:
        """Return the placeholder of a word's secret."""
        same = [name for name, value in {**self._exported, **self.values}.items() if value == secret.value]
        name = same[0] if same else self._new_name(secret.name)
        self.values[name] = secret.value
        return f"{{env:{name}}}"

    def of_export(self, option: str) -> str:
        """Return an option of sbatch or srun; of `--export=NAME=VALUE` with a secret it keeps the name alone.

        Slurm then takes the value from the environment of sbatch, which is that of `meshtune run`.
        """
        if not option.startswith("--export="):
            return option
        kept = []
        for part in option.removeprefix("--export=").split(","):
            name, equals, value = part.partition("=")
            if equals and is_secret(name, value):
                self.values[name] = value
            kept.append(name if name in self.values else part)
        return f"--export={','.join(kept)}"

    def everywhere(self, text: str, variable: str = "") -> str:
        """Return a text with placeholders for all secrets that were found; a variable's own value gets its own."""
        if variable and len(text) >= _SHORTEST and text in self.values.values():
            self.values[variable] = text
            return f"{{env:{variable}}}"
        for name, value in sorted(self.values.items(), key=lambda item: -len(item[1])):
            text = _replace_whole(value, f"{{env:{name}}}", text) if len(value) >= _SHORTEST else text
        return text

    def texts(self) -> list[str]:
        """Return the values that are hidden wherever they occur, as the study and as the script spells them."""
        found = {text for value in self.values.values() for text in (value, _unescaped(value))}
        return sorted((text for text in found if len(text) >= _SHORTEST), key=len, reverse=True)

    def _new_name(self, flag: str) -> str:
        """Return a name for the variable of a flag's secret, which no other variable has."""
        last = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.split(r"[./]", flag)[-1])
        word = re.sub(r"[^A-Za-z0-9]+", "_", last).strip("_").upper()
        base = word if re.match("[A-Z]", word) else f"SECRET_{word}".rstrip("_")
        taken = {*self._exported, *self.values}
        names = [base, *(f"{base}_{number}" for number in range(2, len(taken) + 2))]
        return next(name for name in names if name not in taken)


def _replace_whole(value: str, by: str, text: str) -> str:
    """Replace a value where it is no part of another word, and no placeholder of that name."""
    return re.sub(rf"(?<![\w{{-]){re.escape(value)}(?![\w}}-])", lambda _: by, text)


def _unescaped(text: str) -> str:
    return text.replace("{{", "{").replace("}}", "}")
