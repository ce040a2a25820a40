"""Variables that belong to a shell, a login or Meshtune itself, and not to a training."""

from __future__ import annotations

_OF_TOOL = ("MESHTUNE_", "_MESHTUNE_")
"""Beginnings of the names of Meshtune's own variables."""

_LOCALE = ("LC_CTYPE", "C.UTF-8")
"""Variable that Python sets in a stand-in if there is no locale (PEP 538), with its value."""

_OF_SESSION = frozenset(
    {
        *("HOME", "USER", "USERNAME", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "TERM", "COLORTERM", "DISPLAY"),
        *("PS0", "PS1", "PS2", "PS3", "PS4", "PROMPT_COMMAND", "PROMPT_DIRTRIM", "IFS", "OPTIND", "OPTERR", "ENV"),
        *("BASH_ENV", "BASHOPTS", "SHELLOPTS", "SHLVL", "PWD", "OLDPWD", "_", "LINES", "COLUMNS", "HISTFILE"),
        *("HISTSIZE", "HISTFILESIZE", "HISTCONTROL", "HISTIGNORE", "HISTTIMEFORMAT", "LS_COLORS", "LSCOLORS"),
        *("EDITOR", "VISUAL", "PAGER", "LESS", "LESSOPEN", "LESSCLOSE", "TMUX", "TMUX_PANE", "STY", "WINDOWID"),
        *("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_ASKPASS", "XAUTHORITY"),
        *("GPG_AGENT_INFO", "GPG_TTY", "KRB5CCNAME", "DBUS_SESSION_BUS_ADDRESS", "SUDO_USER", "SUDO_UID", "SUDO_GID"),
        "SUDO_COMMAND",
    }
)
_OF_DESKTOP = ("XDG_SESSION_", "XDG_RUNTIME_", "XDG_SEAT", "XDG_VTNR", "BASH_FUNC_", "VSCODE_", "TERM_PROGRAM")


def is_of_tool(name: str, value: str) -> bool:
    """Return whether a variable of a captured command is Meshtune's or its stand-in's, and none of the script."""
    return name.startswith(_OF_TOOL) or (name, value) == _LOCALE


def is_of_session(name: str) -> bool:
    """Return whether a variable belongs to the shell or the login that a script runs in: each trial has its own."""
    return name in _OF_SESSION or name.startswith((*_OF_TOOL, *_OF_DESKTOP))
