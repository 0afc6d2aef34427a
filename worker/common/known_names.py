"""The names of every command's options. A variable or a key that no command reads is refused, with a hint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

CONFIG_VARIABLE: Final = "HEADSTART_CONFIG"
SECRET_VARIABLE: Final = "HEADSTART_CLUSTER_SECRET"
PARTS: Final = ("serve", "gateway", "worker")
_PREFIX: Final = "HEADSTART_"
_FILE: Final = Path(__file__).with_suffix(".json")
_ADDRESS: Final = r"[0-9a-fA-F:.]+"
_PROTOCOL: Final = "(tcp|udp|sctp)"
_OF_A_SERVICE: Final = re.compile(
    rf"""(?P<service>[A-Z0-9_]+)_
    ( SERVICE_HOST={_ADDRESS} | SERVICE_PORT(_[A-Z0-9_]+)?=\d+
    | PORT(_\d+_{_PROTOCOL.upper()})?={_PROTOCOL}://(\[{_ADDRESS}\]|{_ADDRESS}):\d+
    | PORT_\d+_{_PROTOCOL.upper()}_(PROTO={_PROTOCOL}|PORT=\d+|ADDR={_ADDRESS}) )""",
    re.VERBOSE,
)
"""A variable with its value, as Kubernetes sets it in pods for each Service of their namespace."""


def known_options() -> dict[str, list[str]]:
    """Return the options that variables and the file may set, by command. tools/configuration.py writes them."""
    options: dict[str, list[str]] = json.loads(_FILE.read_text())
    return options


def variable(command: str | None, option: str) -> str:
    """Return the environment variable of a command's option."""
    prefix = "" if command in PARTS else f"{command}_"
    return f"{_PREFIX}{prefix}{option}".upper().replace("-", "_")


def without_services(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of Kubernetes: a Service `headstart` sets HEADSTART_PORT to a URL."""

    def is_of_a_service(name: str) -> bool:
        match = _OF_A_SERVICE.fullmatch(f"{name}={environ[name]}")
        return match is not None and f"{match['service']}_SERVICE_HOST" in environ

    return {name: value for name, value in environ.items() if not is_of_a_service(name)}


def unknown_variable(environ: Mapping[str, str], options: Mapping[str, Iterable[str]]) -> str | None:
    """Return what is wrong with a variable that no command reads, or None."""
    known = {variable(command, option) for command, names in options.items() for option in names}
    known |= {CONFIG_VARIABLE, SECRET_VARIABLE}
    for name in sorted(environ.keys() - known):
        if name.upper().startswith(_PREFIX):
            return f"no command reads the variable {name}{suggestion(name, known, _PREFIX)}"
        # One wrong, missing, further or swapped letter of the prefix leaves its beginning or its end.
        looks_alike = name[:4].upper() == _PREFIX[:4] or _PREFIX[5:] in name[4:11].upper()
        if looks_alike and (near := get_close_matches(name.upper(), known, n=2, cutoff=0.9)):
            return f"no command reads the variable {name}{_hint(near)}"
    return None


def unknown_key(tables: Mapping[str, Any], options: Mapping[str, Iterable[str]]) -> str | None:
    """Return what is wrong with a table, or a key of one, that no command reads, or None."""
    for table, values in tables.items():
        if not isinstance(values, Mapping):
            return f"{table} belongs into a table, such as [gateway]"
        if table not in options:
            return f"no command reads the table [{table}]{suggestion(table, options)}"
        if unknown := min(values.keys() - set(options[table]), default=None):
            return f"[{table}] has no option {unknown!r}{suggestion(unknown, options[table])}"
    return None


def suggestion(word: str, words: Iterable[str], prefix: str = "") -> str:
    """Return a hint at the nearest word, or at three that are near, or nothing. All begin with the prefix."""
    known = {each.removeprefix(prefix).casefold(): each for each in words}
    low = word[len(prefix) :].casefold()
    # A variable of `gateway` or `worker` has no command in its name.
    own = [part for part in (low.removeprefix(f"{part}_") for part in PARTS) if part in known]
    near = own or get_close_matches(low, known, n=3, cutoff=0.75) or get_close_matches(low, known, n=1, cutoff=0.6)
    return _hint(known[each] for each in near)


def _hint(words: Iterable[str]) -> str:
    text = " or ".join(words)
    return f"; did you mean {text}?" if text else ""
