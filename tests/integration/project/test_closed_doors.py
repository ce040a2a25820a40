"""What no module of ours may call, found by reading all of them; exceptions stand in one table, with their reasons."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = sorted(path for room in ("hardware", "costmodels", "trials", "tuner") for path in (ROOT / room).rglob("*.py"))

OUR_PROCESSES = "between processes that we start ourselves, over descriptors that only they inherit"
COMMAND_LINE = "a module that the user names on the command line"
OUR_NAMES = "only names that stand in our own source"

EXCEPTIONS = {
    # who calls what: why that is no door
    ("trials/command/process_tree.py", "subprocess.Popen"): "the user's command, as a list of arguments",
    ("trials/command/slurm/queue.py", "subprocess.Popen"): "programs of Slurm, as a list of arguments",
    ("trials/command/slurm/prober.py", "subprocess.Popen"): "srun with our own module, as a list of arguments",
    (
        "trials/link_probe/transfer.py",
        "socket.create_server",
    ): "one address, for one sender with a token; at most 64 MiB of which nothing is kept, in seconds",
    (
        "trials/ranks/server.py",
        "socket.create_server",
    ): "reserves the port at which ranks of a trial meet; reads nothing",
    ("tuner/dashboard/server.py", "wsgiref.simple_server.WSGIServer"): "pages to read, for known host names only",
    ("trials/jax_training/rank_program.py", "socket.create_server"): "holds a port for a moment; accepts nothing",
    ("tuner/capture/stand_in.py", "os.spawnvpe"): "a command inside the captured one, as a list of arguments",
    ("tuner/capture/program_output.py", "subprocess.Popen"): "a program whose output the script reads, as a list",
    ("tuner/capture/room/enter.py", "os.execve"): "the user's script behind its boundary, as a list of arguments",
    ("tuner/rehearsal/both_rooms/program.py", "runpy"): "the study's program, as the user agreed, behind its boundary",
    ("tuner/rehearsal/torch_room/serve.py", "importlib.import_module"): OUR_NAMES,
    ("tuner/rehearsal/jax_room/serve.py", "importlib.import_module"): OUR_NAMES,
    ("tuner/rehearsal/entrance.py", "importlib.import_module"): OUR_NAMES,
    ("tuner/rehearsal/torch_room/on_import.py", "importlib.import_module"): "what the study's program imports",
    ("tuner/rehearsal/torch_room/frameworks/megatron.py", "importlib.import_module"): OUR_NAMES,
    ("tuner/rehearsal/torch_room/frameworks/transformer_engine.py", "importlib.import_module"): OUR_NAMES,
    ("tuner/rehearsal/side_process.py", "subprocess.Popen"): "our own module, as a list of arguments",
    ("tuner/rehearsal/torch_room/frameworks/flash_attention.py", "importlib.import_module"): OUR_NAMES,
    ("tuner/rehearsal/torch_room/frameworks/quantized.py", "importlib.import_module"): OUR_NAMES,
    ("trials/on_ray/local.py", "subprocess.Popen"): "our own module, as a list of arguments",
    ("trials/ranks/processes.py", "subprocess.Popen"): "our own module, as a list of arguments",
    ("tuner/__init__.py", "importlib.import_module"): "modules of ours, from a table of names that stands beside it",
    ("hardware/io/plugins.py", "importlib.metadata.entry_points"): "packages that the user has installed for Meshtune",
    ("tuner/cli/main.py", "os.execv"): "this very process again, without secrets in its command line",
    ("trials/ranks/processes.py", "multiprocessing.connection"): OUR_PROCESSES,
    ("trials/ranks/server.py", "multiprocessing.connection"): OUR_PROCESSES,
    ("tuner/atlas/answers.py", "concurrent.futures"): OUR_PROCESSES,
    ("tuner/atlas/answers.py", "multiprocessing"): OUR_PROCESSES,
    ("tuner/planners/engine/workers.py", "multiprocessing"): OUR_PROCESSES,
    ("tuner/planners/engine/workers.py", "concurrent.futures"): OUR_PROCESSES,
    ("costmodels/sharding/frontends/factories.py", "importlib.import_module"): COMMAND_LINE,
    ("trials/ranks/server.py", "importlib.import_module"): OUR_NAMES,
    ("trials/on_ray/local.py", "importlib.import_module"): OUR_NAMES,
    ("trials/registry.py", "importlib.import_module"): OUR_NAMES,
    ("tuner/cli/completion.py", "importlib.import_module"): OUR_NAMES,
    ("tuner/planners/__init__.py", "importlib.import_module"): OUR_NAMES,
    ("costmodels/blocks/registry.py", "importlib.import_module"): "the files of its own folder",
    (
        "hardware/io/config_file.py",
        "yaml.SafeLoader",
    ): "the base of the strict loader, which makes text, numbers and lists",
    ("costmodels/calibration/profile_file.py", "yaml.safe_dump"): "writes",
    ("tuner/catalog/entry.py", "yaml.safe_dump"): "writes",
    ("trials/command/knob_files.py", "yaml.safe_dump"): "writes",
    ("trials/command/knob_files.py", "yaml.safe_load"): "reads a framework's file as the framework does",
    ("tuner/export/flagscale.py", "yaml.safe_dump"): "writes",
    ("tuner/export/gpt_neox.py", "yaml.safe_dump"): "writes",
    ("tuner/watch/hook.py", "subprocess.Popen"): "the user's own command, from the command line, without a shell",
    ("tuner/export/nanotron.py", "yaml.safe_dump"): "writes",
    ("tuner/study_file/own_study_text.py", "yaml.safe_dump"): "writes",
    ("tuner/study_file/text.py", "yaml.safe_dump"): "writes",
}
"""Ray, too, pickles between its own processes; nothing of ours hands it bytes from elsewhere."""

NEVER_IMPORTED = {
    *("pickle", "cPickle", "_pickle", "marshal", "shelve", "dbm", "dill", "cloudpickle", "joblib", "jsonpickle", "xml"),
    *("lxml", "xmlrpc", "html5lib", "plistlib", "pty", "commands", "code", "codeop", "imp", "telnetlib"),
    *("ftplib", "smtplib", "urllib.request", "http.client", "http.server", "socketserver.TCPServer", "requests"),
}
NEVER_CALLED = {
    *("eval", "exec", "compile", "__import__", "input", "breakpoint"),
    *("os.system", "os.popen", "os.startfile", "tempfile.mktemp", "os.tempnam", "os.tmpnam"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "subprocess.run", "subprocess.call"),
    *("subprocess.check_call", "subprocess.check_output", "asyncio.create_subprocess_shell"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("torch.load", "torch.save", "torch.hub", "torch.jit.load", "numpy.load", "np.load", "numpy.fromfile"),
    *("shutil.unpack_archive", "tarfile.open", "zipfile.ZipFile", "ctypes.pythonapi"),
}
LISTED = {
    "subprocess.Popen",
    "importlib.metadata.entry_points",
    "importlib.import_module",
    "socket.create_server",
    "wsgiref.simple_server.WSGIServer",
} | {
    f"os.{name}{kind}"
    for name in ("exec", "spawn", "posix_spawn")
    for kind in ("", "l", "le", "lp", "lpe", "v", "ve", "vp", "vpe", "p")
}
_YAML = re.compile(r"yaml\.\w*([lL]oad|[lL]oader|dump)")
LISTED_IMPORTS = {"runpy", "multiprocessing", "multiprocessing.connection", "concurrent.futures"}


def imported_names(tree):
    """By the local name what it stands for, and all modules that are imported."""
    names, modules = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules.add(alias.name)
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
            for alias in node.names:
                modules.add(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names, modules


def used_names(tree, names):
    """The dotted names that the code uses, with what they stand for."""
    for node in ast.walk(tree):
        parts = []
        inner = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and isinstance(node, (ast.Attribute, ast.Name)):
            base = names.get(inner.id, inner.id)
            yield ".".join([base, *reversed(parts)])


def doors(path):
    """What a module uses that the tables name, and whether an exception may be made of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names, modules = imported_names(tree)
    assigned = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = set()
    for module in modules:
        parents = {module} | {module[:at] for at, char in enumerate(module) if char == "."}
        found |= {(door, False) for door in parents & NEVER_IMPORTED}
        found |= {(door, True) for door in {module} & LISTED_IMPORTS}
    for name in used_names(tree, names):
        if name in NEVER_CALLED and name not in assigned:
            found.add((name, False))
        if name in LISTED or _YAML.fullmatch(name):
            found.add((name, True))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "shell":
            found.add(("shell=", False))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.add(("allow_pickle=", False))
    return found


def test_no_module_opens_a_door():
    """No module unpickles, evaluates, runs shells, parses XML, or loads what could run; what starts a process, listens
    or imports by name stands in the table, with its reason.
    """
    opened = {(path.relative_to(ROOT).as_posix(), door): may_be for path in MODULES for door, may_be in doors(path)}

    assert len(MODULES) > 250
    assert {door for door, may_be in opened.items() if not may_be} == set()
    assert set(opened) == set(EXCEPTIONS), "an exception that nobody needs any more goes, and a new one needs a reason"


OF_THE_SYSTEM = "the kernel's own tables under /proc"
OF_OURS = "a file of our own package"
A_LOCK = "a lock, which is neither read nor written, and no link is followed"
IN_OUR_FOLDER = "in a temporary folder that this process has made"
A_DATABASE = "a storage, which its own reader checks"

OPENERS = {
    # who opens files by itself: why it does not use hardware/io
    ("costmodels/operators/kernel_catalog.py", "open"): OF_OURS,
    ("trials/command/knob_files.py", "write_text"): IN_OUR_FOLDER,
    ("trials/command/log_reader.py", "os.fdopen"): "a descriptor from hardware/io",
    ("trials/command/process_tree.py", "read_text"): OF_THE_SYSTEM,
    ("trials/command/slurm/job_program.py", "os.open"): "the output of our own job, which is followed while it grows",
    ("trials/command/slurm/keeper.py", "os.fdopen"): "a pipe from our own process",
    ("trials/jax_training/model/device_share.py", "read_text"): IN_OUR_FOLDER,
    ("trials/training/processor_time.py", "read_text"): OF_THE_SYSTEM,
    ("trials/ranks/memory_limit.py", "read_text"): OF_THE_SYSTEM,
    ("trials/ranks/processes.py", "tempfile.TemporaryFile"): "the output of our own ranks, in a file without a name",
    ("trials/on_ray/keeper.py", "open"): OF_THE_SYSTEM,
    ("trials/on_ray/leftovers.py", "read_bytes"): OF_THE_SYSTEM,
    ("trials/torch_training/rank_program.py", "read_text"): OF_THE_SYSTEM,
    ("trials/torch_training/rank_program.py", "write_text"): OF_THE_SYSTEM,
    ("costmodels/sharding/frontends/users_code.py", "open"): "a stream on a descriptor that is open already",
    ("costmodels/sharding/frontends/users_code.py", "os.open"): "the working directory, and /dev/null",
    ("tuner/atlas/answers.py", "write_text"): IN_OUR_FOLDER,
    ("tuner/cli/init.py", "write_text"): IN_OUR_FOLDER,
    ("tuner/cli/main.py", "read_text"): OF_OURS,
    ("tuner/planners/engine/branch_and_bound.py", "open"): "opens a node of a search tree, no file",
    ("tuner/plans/plan_cache.py", "read_bytes"): OF_OURS,
    ("tuner/rehearsal/program.py", "open"): "the first line of torchrun, which names its interpreter",
    ("tuner/rehearsal/identity.py", "read_bytes"): OF_OURS,
    ("tuner/report/figures.py", "read_text"): OF_OURS,
    ("tuner/rehearsal/side_process.py", "tempfile.TemporaryFile"): "the request to our own process, without a name",
    ("tuner/rehearsal/run.py", "read_text"): IN_OUR_FOLDER,
    ("tuner/rehearsal/run.py", "write_text"): IN_OUR_FOLDER,
    ("tuner/rehearsal/run.py", "shutil.copytree"): IN_OUR_FOLDER,
    ("tuner/rehearsal/run.py", "shutil.copyfile"): IN_OUR_FOLDER,
    ("tuner/rehearsal/entrance.py", "read_text"): IN_OUR_FOLDER,
    ("tuner/rehearsal/entrance.py", "read_bytes"): "the study's program, for what it imports",
    ("tuner/rehearsal/jax_room/serve.py", "read_text"): IN_OUR_FOLDER,
    ("tuner/rehearsal/jax_room/serve.py", "os.fdopen"): "pipes between our own processes",
    ("tuner/rehearsal/torch_room/serve.py", "os.fdopen"): "pipes between our own processes",
    ("tuner/rehearsal/torch_room/on_import.py", "read_bytes"): "the study's program, for what it imports",
    ("tuner/rehearsal/torch_room/serve.py", "read_text"): IN_OUR_FOLDER,
    ("tuner/learn/from_logs.py", "write_text"): IN_OUR_FOLDER,
    ("tuner/learn/pool.py", "os.fdopen"): A_LOCK,
    ("tuner/learn/pool.py", "os.open"): A_LOCK,
    ("tuner/learn/rows.py", "write_text"): IN_OUR_FOLDER,
    ("tuner/run/driver.py", "read_text"): OF_THE_SYSTEM,
    ("tuner/storage/backup.py", "os.open"): A_DATABASE,
    ("tuner/storage/backup.py", "read_bytes"): A_DATABASE,
    ("tuner/storage/backup.py", "sqlite3.connect"): A_DATABASE,
    ("tuner/storage/backup.py", "write_bytes"): "a copy under a name that did not exist",
    ("tuner/storage/integrity.py", "open"): A_DATABASE,
    ("tuner/storage/journal_file.py", "open"): A_DATABASE,
    ("tuner/storage/journal_file.py", "os.open"): A_DATABASE,
    ("tuner/storage/sql_store.py", "sqlite3.connect"): A_DATABASE,
    ("tuner/watch/state.py", "os.open"): A_LOCK,
}
CAPTURE = "tuner/capture/"
"""Folder of what runs a user's script, whose files are copies and records in a room of its own."""

OPENING = {"os.open", "os.fdopen", "io.open", "io.FileIO", "gzip.open", "bz2.open", "lzma.open", "codecs.open"} | {
    *("sqlite3.connect", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move"),
    *("tempfile.NamedTemporaryFile", "tempfile.mkstemp", "tempfile.TemporaryFile", "json.load", "tomllib.load"),
    *("np.save", "np.savez", "np.loadtxt", "np.genfromtxt", "numpy.save", "numpy.savez", "numpy.loadtxt"),
}
METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "tofile"}
"""Of paths and arrays, whatever name they have."""


def opened_by(path):
    """The calls in a module that open, read or write a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names, _ = imported_names(tree)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(id=name) if names.get(name, name) in OPENING | {"open"}:
                found.add(names.get(name, name))
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (
                f"{names.get(module, module)}.{name}" in OPENING
            ):
                found.add(f"{names.get(module, module)}.{name}")
            case ast.Attribute(attr=name) if name in METHODS - defined:
                found.add(name)
    return found


def test_files_are_opened_in_one_room():
    """No module outside hardware/io opens, reads or writes a file by itself, but those in the table, with a reason."""
    outside = (path for path in MODULES if (ROOT / "hardware/io") not in path.parents)
    found = {(path.relative_to(ROOT).as_posix(), call) for path in outside for call in opened_by(path)}

    assert {one for one in found if not one[0].startswith(CAPTURE)} == set(OPENERS)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("open('x')", "open"),
        ("from pathlib import Path as P\nP('x').read_text()", "read_text"),
        ("import os as o\no.open('x', 0)", "os.open"),
        ("from os import fdopen as f\nf(3)", "os.fdopen"),
        ("import numpy as np\nnp.loadtxt('x')", "numpy.loadtxt"),
        ("def read(path):\n    with path.open() as file:\n        return file", "open"),
    ],
)
def test_an_opened_file_would_be_seen(tmp_path, code, call):
    """Each of these is found, so that the test above can fail."""
    path = tmp_path / "module.py"
    path.write_text(code, encoding="utf-8")

    assert call in opened_by(path)


@pytest.mark.parametrize(
    ("code", "door"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("from xml.etree import ElementTree as tree", "xml"),
        ("eval('1')", "eval"),
        ("from os import system as quietly\nquietly('x')", "os.system"),
        ("import subprocess as s\ns.run(['x'])", "subprocess.run"),
        ("from subprocess import Popen\nPopen('x', shell=True)", "shell="),
        ("import yaml\nyaml.load('x', Loader=yaml.Loader)", "yaml.load"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle="),
        ("from tempfile import mktemp\nmktemp()", "tempfile.mktemp"),
        ("__builtins__\n__import__('x')", "__import__"),
    ],
)
def test_such_a_door_would_be_seen(tmp_path, code, door):
    """Each of these is found under whatever name it is imported, so that the test above can fail."""
    path = tmp_path / "module.py"
    path.write_text(code, encoding="utf-8")

    assert (door, False) in doors(path)
