"""Bash that every shell of a captured script runs first, and the program that stands in for shells."""

from __future__ import annotations

from pathlib import Path

from tuner.capture.launchers import ANY, TRAINING

SHELLS = ("bash", "sh")
LOGIN_LINE = "^#!.*(bash|sh) +(-[a-z]*l|--login)"
"""First line of a script that a login shell runs."""
_USUAL_FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/conda/bin", "/opt/venv/bin")
_PRELUDE = r"""# A command that fails here, such as one of a missing environment, does not end the script,
# nor does a variable that is not set here. A program that has a stand-in is called by name, at any path, and so is an
# interpreter at a path that only another machine has. The search path is set right before each command, since login
# shells and modules set it anew.
meshtune_path() {
    case "$PATH" in
        "BIN_FOLDER":*) ;;
        *) PATH="BIN_FOLDER:$PATH" ;;
    esac
}
meshtune_path
set -o functrace
trap 'set +eu; meshtune_path; meshtune_by_path' DEBUG
meshtune_by_path() {
    local word="${BASH_COMMAND%%[[:space:]]*}"
    # variables may be set for the command alone
    if [[ $BASH_COMMAND =~ ^([A-Za-z_][A-Za-z0-9_]*=[^[:space:]\"\'\$\`\(]*[[:space:]]+)+([^[:space:]]+) ]]; then
        word="${BASH_REMATCH[2]}"
    fi
    case "$word" in
        *'$('* | *'`'* | *=*) return ;;
        \$* | '"'\$* | /* | '~'* | ./* | ../*) ;;
        *) return ;;
    esac
    eval "word=$word" 2>/dev/null
    local own="BIN_FOLDER/${word##*/}" first=
    case "$word" in
        "BIN_FOLDER"/* | */bash | */sh) return ;;
        # one that this machine has loads what sends it to the stand-in
        */python | */python[0-9]* | */torchrun | */deepspeed | */accelerate) [ -x "$word" ] && return ;;
    esac
    if [ -x "$own" ]; then
        eval "function $word { \"$own\" \"\$@\"; }" 2>/dev/null
        return
    fi
    # a script that names a login shell would run this machine's profile first
    [ -f "$word" ] && { IFS= read -r first < "$word"; } 2>/dev/null
    [[ $first =~ LOGIN_LINE ]] && eval "function $word { bash \"$word\" \"\$@\"; }" 2>/dev/null
}
command_not_found_handle() {
    if [ "$1" = "${1##*/}" ] && [ -x "BIN_FOLDER/$1" ]; then
        "BIN_FOLDER/$1" "${@:2}"
        return
    fi
    "BIN_FOLDER/ANY_NAME" "$@" && return
    echo "capture: no such command here: $1" >&2
    return 127
}
# A folder that only a container or another machine has is passed over.
cd() { builtin cd "$@" 2>/dev/null || echo "capture: no folder here: $*" >&2; }
"""
_SHELL = """\
#!BASH -p
# Other shells would drop exported functions, and without -p this one would load the prelude twice.
# A login shell would run this machine's profile, which sets the search path anew and may start programs.
leading=yes
for word do
    shift
    case "$leading$word" in
        yes--login | yes-l) continue ;;
        yes-[a-z]*l* | yes-l*) word=$(printf %s "$word" | tr -d l) ;;
        yes[-+]*) ;;
        *) leading= ;;
    esac
    set -- "$@" "$word"
done
exec BASH "$@"
"""


def prelude(stand_ins: Path) -> str:
    """Return what every shell of the script runs first, with the folder of the stand-ins."""
    values = {
        "ANY_NAME": ANY,
        "BIN_FOLDER": str(stand_ins),
        "LOGIN_LINE": LOGIN_LINE.replace(" ", "[[:space:]]").replace("!", "\\!"),
    }
    text = _PRELUDE
    for name, value in values.items():
        text = text.replace(name, value)
    return text + _functions()


def shell(bash: str) -> str:
    """Return the program that stands in for a shell: bash at that path, without a profile."""
    return _SHELL.replace("BASH", bash)


def _functions() -> str:
    """Return functions that stand in for shells by their path, and for interpreters at one of a container."""
    paths = [f"{folder}/{name}" for folder in _USUAL_FOLDERS for name in TRAINING[:5]]
    paths += [f"{folder}/{name}" for folder in ("/bin", "/usr/bin") for name in SHELLS]
    return "".join(f'function {path} {{ {Path(path).name} "$@"; }}\n' for path in paths)
