"""The command line: lazy commands, and one line with the right exit code for everything that goes wrong."""

import importlib.util

import pytest

from verl_mux import cli
from verl_mux.errors import Failure, UserError


@pytest.fixture
def command(monkeypatch):
    """Let `verl-mux doctor` do something else."""

    def becomes(function) -> None:
        monkeypatch.setattr(cli, "_load", lambda module, name: function)

    return becomes


def test_help_lists_every_command_without_importing_one(run_main):
    code, out, _ = run_main("--help")
    assert code == 0 and all(name in out for name in (*cli.COMMANDS, "bench"))
    code, out, _ = run_main("bench", "--help")
    assert code == 0 and all(name in out for name in cli.BENCHES)


@pytest.mark.parametrize(("table", "name"), [(t, name) for t in (cli.COMMANDS, cli.BENCHES) for name in t])
def test_every_commands_module_is_in_the_package(table, name):
    assert importlib.util.find_spec(table[name][0]) is not None


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
