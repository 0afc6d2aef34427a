"""The parser of every command: options come from the command line, else the environment, else a file.

A variable or a key that no command reads is refused, with a hint.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

CONFIG_VARIABLE: Final = "HEADSTART_CONFIG"
SECRET_VARIABLE: Final = "HEADSTART_CLUSTER_SECRET"
PARTS: Final = ("serve", "gateway", "worker")
_PREFIX: Final = "HEADSTART_"
_FILE: Final = Path(__file__).with_name("known_names.json")
_BOOLEANS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class CommandParser(argparse.ArgumentParser):
    """A parser with short errors. With a `command`, it also reads the variables and the table of that name.

    HEADSTART_PORT is --port of `serve`, `gateway` and `worker`. A tool's variables have its name too:
    HEADSTART_TOP_INTERVAL. A variable, table or key that no command reads is an error of every command.
    """

    def __init__(self, *args: Any, command: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs, "exit_on_error": False})
        self.command = command
        if command is not None:
            text = f"TOML file with options, in a table [{command}] (default: ${CONFIG_VARIABLE})"
            self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Exits with code 2 after a line that names the option, and the nearest one there is."""
        argv = list(sys.argv[1:] if args is None else args)
        words, origins = self._from_outside(argv)
        try:
            parsed, unknown = super().parse_known_args([*words, *argv], namespace)
        except argparse.ArgumentError as error:
            origin = origins.get((error.argument_name or "").rpartition("/")[2])
            self.error(f"{error}{f' (from {origin})' if origin else ''}")
        if unknown:
            hint = suggestion(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        if hasattr(parsed, "config"):
            del parsed.config
        return parsed, []

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists its options.\n")

    def variable(self, flag: str) -> str:
        """Return the environment variable of an option."""
        return variable(self.command, flag.removeprefix("--"))

    def option_names(self) -> list[str]:
        """Return the options that a variable and the file may set."""
        return [flag.removeprefix("--") for flag in self._settable()]

    def leave_to_children(self, argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
        """Remove this command's own variables, and name the file of options: children read their tables in it."""
        if file := self.file(argv):
            environ[CONFIG_VARIABLE] = str(Path(file).absolute())
        for flag in self._settable():
            environ.pop(self.variable(flag), None)

    def file(self, argv: Sequence[str]) -> str | None:
        """Return the file of options that the command line or the environment names."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", nargs="?", default=os.environ.get(CONFIG_VARIABLE))
        file: str | None = finder.parse_known_args(argv)[0].config
        return file

    def _from_outside(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return what the file and the environment add to a command line, and the origin of each flag."""
        given = {word.partition("=")[0] for word in argv}
        if given & {"-h", "--help"}:
            return [], {}
        environ = without_services(os.environ)
        settable = self._settable() if self.command is not None else {}
        known = known_options() | ({self.command: self.option_names()} if self.command is not None else {})
        if problem := unknown_variable(environ, known):
            self.error(problem)
        found: dict[str, tuple[str, object]] = {}
        if file := self.file(argv):
            values = self._tables(file, known).get(self.command or "", {})
            found = {f"--{name}": (f"{file} [{self.command}]", value) for name, value in values.items()}
        for flag, action in settable.items():
            if (text := environ.get(name := self.variable(flag))) is not None:
                # JSON may have spaces, so it is one value.
                is_list = _is_list(action) and not str(action.metavar).endswith("JSON")
                found[flag] = name, text.split() if is_list else text
        words: list[str] = []
        origins: dict[str, str] = {}
        for flag, (origin, value) in found.items():
            if given.isdisjoint(settable[flag].option_strings):
                try:
                    words += _words(flag, settable[flag], value)
                except ValueError as error:
                    self.error(f"argument {flag}: {error} (from {origin})")
                origins[flag] = origin
        return words, origins

    def _settable(self) -> dict[str, argparse.Action]:
        """Return each option by its last name."""
        actions = (action for action in self._actions if action.dest not in ("help", "config"))
        return {action.option_strings[-1]: action for action in actions if action.option_strings}

    def _tables(self, file: str, known: Mapping[str, Iterable[str]]) -> dict[str, Any]:
        try:
            tables = tomllib.loads(Path(file).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            self.error(f"--config {file}: {reason(error)}")
        for table, values in tables.items():
            if not isinstance(values, Mapping):
                problem = f"{table} belongs into a table, such as [gateway]"
            elif table not in known:
                problem = f"no command reads the table [{table}]{suggestion(table, known)}"
            elif unknown := min(values.keys() - {*known[table]}, default=None):
                problem = f"[{table}] has no option {unknown!r}{suggestion(unknown, known[table])}"
            else:
                continue
            self.error(f"--config {file}: {problem}")
        return tables


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)  # also of `extend`


def _words(flag: str, action: argparse.Action, value: object) -> list[str]:
    """Return a value as words of a command line. Raises ValueError."""
    if action.nargs == 0:
        if (wanted := _BOOLEANS.get(str(value).lower())) is None:
            raise ValueError(f"must be true or false, got {value!r}")
        return [flag] if wanted else []
    values = value if isinstance(value, list) and _is_list(action) else [value]
    if any(isinstance(each, bool | dict | list) for each in values):
        raise ValueError(f"takes a value, got {value!r}")
    return [f"{flag}={each}" for each in values]


def reason(error: Exception) -> str:
    """Return why a file, a socket or a request failed, without a number or a name."""
    text = getattr(error, "strerror", None) or str(error)
    return text or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def known_options() -> dict[str, list[str]]:
    """Return the options that variables and the file may set, by command. tools/configuration.py writes them."""
    return dict(json.loads(_FILE.read_text()))


def variable(command: str | None, option: str) -> str:
    """Return the environment variable of a command's option."""
    prefix = "" if command in PARTS else f"{command}_"
    return f"{_PREFIX}{prefix}{option}".upper().replace("-", "_")


def without_services(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of Kubernetes: a Service `headstart` sets HEADSTART_PORT to a URL."""
    services = [name.removesuffix("SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST")]
    return {
        name: value
        for name, value in environ.items()
        if not any(
            name.startswith((f"{service}SERVICE_", f"{service}PORT_")) or (name == f"{service}PORT" and "://" in value)
            for service in services
        )
    }


def unknown_variable(environ: Mapping[str, str], options: Mapping[str, Iterable[str]]) -> str | None:
    """Return what is wrong with a variable that no command reads, or None."""
    known = {variable(command, option) for command, names in options.items() for option in names}
    known |= {CONFIG_VARIABLE, SECRET_VARIABLE}
    for name in sorted(environ.keys() - known):
        hint = suggestion(name, known, _PREFIX)
        if not name.upper().startswith(_PREFIX):
            # One wrong, missing, further or swapped letter of the prefix leaves its beginning or its end.
            looks_alike = name[:4].upper() == _PREFIX[:4] or _PREFIX[5:] in name[4:11].upper()
            hint = _hint(get_close_matches(name.upper(), known, n=2, cutoff=0.9)) if looks_alike else ""
            if not hint:
                continue
        return f"no command reads the variable {name}{hint}"
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


def check_web_url(name: str, url: str) -> None:
    """Raise a ValueError that begins with `name` for a URL that is not http:// or https:// with a host."""
    with suppress(ValueError):  # of its port or IPv6 address
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise ValueError(f"{name} must begin with http:// or https://, a host and a port or none, got {url!r:.200}")


def read_text(option: str, file: str) -> str:
    """Return the line of text in a file. Raises ValueError that names the option."""
    text = read_secret(option, file).decode(errors="surrogateescape")
    if not text.isprintable():
        raise ValueError(f"{option} {file} is not one line of text")
    return text


def read_secret(option: str, file: str) -> bytes:
    """Return what a file holds. Raises ValueError that names the option, also for an empty file."""
    try:
        secret = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8).strip()  # Notepad writes one
    except OSError as error:
        raise ValueError(f"{option} {file}: {reason(error)}") from error
    if not secret:
        raise ValueError(f"{option} {file} is empty")
    return secret


def module_command(module: str, *options: str) -> list[str]:
    """Return the command. With -P, no file of the current folder shadows a module or package."""
    return [sys.executable, "-P", *options, "-m", module]
