"""The parser of every command: options come from the command line, else the environment, else a file."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from worker.common.known_names import (
    CONFIG_VARIABLE,
    known_options,
    suggestion,
    unknown_key,
    unknown_variable,
    variable,
    without_services,
)

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

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Exits with code 2 after a line that names the option, and the nearest one there is."""
        parsed: argparse.Namespace
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = suggestion(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        argv = list(sys.argv[1:] if args is None else args)
        words, origins = self._from_outside(argv)
        try:
            parsed, unknown = super().parse_known_args([*words, *argv], namespace)
        except argparse.ArgumentError as error:
            origin = origins.get((error.argument_name or "").rpartition("/")[2])
            self.error(f"{error}{f' (from {origin})' if origin else ''}")
        if hasattr(parsed, "config"):
            del parsed.config
        return parsed, unknown

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

    def _from_outside(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return what the environment and the file add to a command line, and the origin of each flag."""
        given = {word.partition("=")[0] for word in argv}
        if given & {"-h", "--help"}:
            return [], {}
        environ = without_services(os.environ)
        options = known_options()
        if self.command is not None:
            options[self.command] = self.option_names()
        if problem := unknown_variable(environ, options):
            self.error(problem)
        words: dict[str, list[str]] = {}
        origins: dict[str, str] = {}
        for origin, flag, action, value in [*self._file_options(argv, options), *self._variables(environ)]:
            if given.isdisjoint(action.option_strings):
                try:
                    words[flag] = list(_words(flag, action, value))
                except ValueError as error:
                    self.error(f"argument {flag}: {error} (from {origin})")
                origins[flag] = origin
        return [word for part in words.values() for word in part], origins

    def _settable(self) -> dict[str, argparse.Action]:
        """Return each option by its last name."""
        actions = (
            action for action in self._actions if action.option_strings and action.dest not in ("help", "config")
        )
        return {action.option_strings[-1]: action for action in actions}

    def _variables(self, environ: Mapping[str, str]) -> Iterator[tuple[str, str, argparse.Action, object]]:
        for flag, action in self._settable().items():
            name = self.variable(flag)
            if self.command is not None and (value := environ.get(name)) is not None:
                yield name, flag, action, _split(value, action) if _is_list(action) else value

    def file(self, argv: Sequence[str]) -> str | None:
        """Return the file of options that the command line or the environment names."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", nargs="?", default=os.environ.get(CONFIG_VARIABLE))
        file: str | None = finder.parse_known_args(argv)[0].config
        return file

    def _file_options(
        self, argv: Sequence[str], options: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[str, str, argparse.Action, object]]:
        if not (file := self.file(argv)):
            return
        try:
            tables = tomllib.loads(Path(file).read_text())
        except (OSError, ValueError) as error:
            self.error(f"--config {file}: {error}")
        if problem := unknown_key(tables, options):
            self.error(f"--config {file}: {problem}")
        settable = self._settable()
        for name, value in tables.get(self.command or "", {}).items():
            yield f"{file} [{self.command}]", f"--{name}", settable[f"--{name}"], value


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)  # also of `extend`


def _split(value: str, action: argparse.Action) -> list[str]:
    """Return the values in a variable. JSON may have spaces, so it is one value."""
    return [value] if str(action.metavar).endswith("JSON") else value.split()


def _words(flag: str, action: argparse.Action, value: object) -> Iterator[str]:
    """Yield a value as words of a command line. Raises ValueError."""
    is_flag = action.nargs == 0 or (action.nargs == "?" and value is True)
    if is_flag:
        wanted = value if isinstance(value, bool) else _BOOLEANS.get(str(value).lower())
        if wanted is None:
            raise ValueError(f"must be true or false, got {value!r}")
        if wanted:
            yield flag
        return
    if isinstance(value, bool | dict):
        raise ValueError(f"takes a value, got {value!r}")
    if not isinstance(value, list):
        yield f"{flag}={value}"
    elif _is_list(action):
        yield from (f"{flag}={each}" for each in value)
    else:
        yield f"{flag}={','.join(map(str, value))}"
