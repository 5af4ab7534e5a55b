"""The Python interpreter: started without the working folder, importing lazily, pausing its garbage collector.

# Note [Code of the working folder]
`python -m` puts the working folder before the standard library, and so does an empty or a relative entry of
PYTHONPATH: a torch.py or json.py there would run. Absolute entries, such as those of a cluster's modules, stay.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module

_PATH = "PYTHONPATH"


def module_command(module: str, *arguments: str, python: str = sys.executable) -> Sequence[str]:
    """Return the command that runs a module, see Note [Code of the working folder]."""
    return (python, "-P", "-m", module, *arguments)


def safe_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for processes that may start Python, see Note [Code of the working folder]."""
    safe = {**environment, "PYTHONSAFEPATH": "1"}
    if relative := relative_entries(safe.get(_PATH, "")):
        safe[_PATH] = os.pathsep.join(entry for entry in safe[_PATH].split(os.pathsep) if entry not in relative)
    return safe


def leave_out_working_folder() -> None:
    """Import nothing more from the working folder in this process if an entry of PYTHONPATH led there."""
    if not (relative := relative_entries(os.environ.get(_PATH, ""))):
        return
    absolute = set(os.environ[_PATH].split(os.pathsep)).difference(relative)
    try:
        dropped = {os.path.abspath(entry) for entry in relative} - {os.path.abspath(entry) for entry in absolute}
    except OSError:  # the working folder was deleted, and its entries with it
        return
    sys.path[:] = [entry for entry in sys.path if os.path.isabs(entry) and entry not in dropped]


def relative_entries(text: str) -> frozenset[str]:
    """Return the entries of a PYTHONPATH that depend on the working folder; an empty one is the folder itself."""
    return frozenset(entry for entry in text.split(os.pathsep) if not os.path.isabs(entry)) if text else frozenset()


def lazy_attributes(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package (PEP 562); `modules` lists the names that each defines."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        attribute = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, attribute)
        return attribute

    def names() -> list[str]:
        return sorted(vars(sys.modules[package])["__all__"])

    return get, names


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection, which visits a million new objects again and again where none is in a cycle.

    It is a decorator, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
