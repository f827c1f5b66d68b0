"""The command line: lazy commands, and one line with the right exit code for everything that goes wrong."""

import importlib.metadata
import importlib.util
from typing import Annotated

import pytest
import typer

from verl_mux import cli
from verl_mux.errors import Failure, UserError


@pytest.fixture
def command(monkeypatch):
    """Let `verl-mux doctor` do something else."""

    def becomes(function) -> None:
        monkeypatch.setattr(cli, "_load", lambda module, name: function)

    return becomes


def test_it_says_its_version(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["verl-mux", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"verl-mux {importlib.metadata.version('verl-mux')}\n"


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_without_a_command_there_is_the_help_and_nothing_else(run_main, words):
    code, out, err = run_main(*words)
    assert code == 2 and "Commands" in out and err == ""


def test_help_lists_every_command_without_importing_one(run_main):
    code, out, _ = run_main("--help")
    assert code == 0 and all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_commands_module_is_in_the_package(name):
    assert importlib.util.find_spec(cli.COMMANDS[name][0]) is not None


@pytest.mark.parametrize("error", [UserError, Failure])
def test_an_error_is_one_line_and_its_own_exit_code(run_main, command, error):
    def doctor() -> None:
        raise error("seed is 'x'; a number is allowed")

    command(doctor)
    code, out, err = run_main("doctor")
    assert (code, out, err) == (2 if error is UserError else 1, "", "verl-mux: seed is 'x'; a number is allowed\n")


def test_a_command_gets_its_arguments(run_main, command):
    seen = []

    def doctor(word: str, count: int = 1) -> None:
        seen.append((word, count))

    command(doctor)
    assert run_main("doctor", "hello", "--count", "3")[0] == 0 and seen == [("hello", 3)]


@pytest.mark.parametrize("arguments", [["no-such-command"], ["bench", "no-such-bench"], ["doctor", "--no-such-option"]])
def test_usage_errors_end_with_2(run_main, command, arguments):
    command(lambda: None)
    code, _, err = run_main(*arguments)
    assert code == 2 and "no-such" in err


def test_without_arguments_it_shows_what_there_is(run_main):
    _, out, err = run_main()
    assert "coordinator" in out + err and "Traceback" not in err


@pytest.mark.parametrize(("given", "allowed"), [("0", "greater than or equal to 1"), ("two", "valid integer")])
def test_a_usage_error_is_one_line_with_what_was_given_and_what_is_allowed(run_main, command, given, allowed):
    def doctor(count: Annotated[int, typer.Option(min=1)] = 1) -> None: ...

    command(doctor)
    code, out, err = run_main("doctor", "--count", given)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("verl-mux: ") and all(words in err for words in ("'--count'", f"{given!r}", allowed, "doctor --help"))


@pytest.mark.parametrize("given", ["nan", "inf", "-inf"])
def test_no_option_takes_a_number_that_is_not_finite(run_main, command, given):
    def doctor(how_long: float = 1.0) -> None: ...

    command(doctor)
    code, out, err = run_main("doctor", "--how-long", given)
    assert (code, out, err) == (2, "", f"verl-mux: --how-long is {given}; a finite number is needed\n")


def test_a_commands_exit_code_is_passed_on(run_main, command):
    def doctor() -> None:
        raise typer.Exit(75)

    command(doctor)
    assert run_main("doctor")[0] == 75
