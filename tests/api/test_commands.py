"""The command line in process: what is refused before anything starts, the configuration file, who wins over whom."""

import json
import socket
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lamina.coordinator.cli import server_commands
from lamina.coordinator.cli.app import app
from lamina.coordinator.cli.config_file import Config, read_config
from lamina.rpc_worker.command import app as worker_app
from lamina.spec.errors import InvalidConfig, LaminaError
from support.models import smollm2_path


def refusal(*arguments: str) -> str:
    """The one line that a command is refused with."""
    result = CliRunner().invoke(app, arguments, env={"LAMINA_CONFIG": ""})
    assert isinstance(result.exception, LaminaError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--host", "0.0.0.0"], "give --api-key, or say --insecure"),
        (["--join-listen", "0.0.0.0:50050"], "say --insecure"),
        (["--join-listen", "127.0.0.1:0", "--workers", "127.0.0.1:9"], "leave one of them out"),
        (["--workers", "nonsense"], "host:port"),
        (["--policy", "best"], "--policy 'best' is none of fcfs, spf"),
        (["--admission", "all"], "--admission 'all' is none of optimistic, reserve"),
        (["--kv-dtype", "q3"], "--kv-dtype 'q3' is none of"),
        (["--wire-dtype", "q3"], "--wire-dtype 'q3' is none of"),
        (["--context", "1M"], "1048576"),
        (["--max-body", "much"], "much"),
        (["--log-level", "loud"], "--log-level 'loud' is none of"),
        (["--split", "0-3", "--split-file", "x.yaml"], "exclude each other"),
    ],
)
def test_serve_refuses_before_it_starts(arguments: list[str], reason: str) -> None:
    assert reason in refusal("serve", str(smollm2_path()), *arguments)


def test_values_are_checked_before_the_model_is_read() -> None:
    """Also one that comes from the environment."""
    assert "is none of fcfs, spf" in refusal("serve", "nothing.gguf", "--policy", "best")
    result = CliRunner().invoke(app, ["serve", "nothing.gguf"], env={"LAMINA_ADMISSION": "all"})
    assert "--admission 'all'" in str(result.exception)


def test_a_plan_for_nobody_says_so() -> None:
    result = CliRunner().invoke(app, ["plan", str(smollm2_path())], env={"LAMINA_WORKERS": "", "LAMINA_MEMORY": ""})
    assert "neither --workers nor --memory" in result.stderr
    assert "neither" not in result.stdout


def test_no_model_no_server(tmp_path: Path) -> None:
    assert "nothing.gguf" in refusal("serve", str(tmp_path / "nothing.gguf"))


@pytest.mark.parametrize("command", ["status", "devices", "chat"])
def test_without_a_server_one_line(command: str) -> None:
    assert "does not answer" in refusal(command, "--url", "http://127.0.0.1:9")
    for url in ("nonsense", "http://h:70000", "http://h:0", "http://[::1", "http://a..b:8080", ""):
        assert "http://host:port" in refusal(command, "--url", url)
    assert "--api-key" in refusal(command, "--api-key", "two\nlines")


def test_a_name_that_is_unknown_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is none of the system's errors."""

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert "(Name or service not known)" in refusal("status", "--url", "http://nobody.invalid")


def answering(data: bytes) -> tuple[str, Thread]:
    """A server that answers one request with these bytes: its URL and the thread to join."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            received = connection.recv(65536)
            connection.sendall(data if b"GET /admin/cluster " in received else b"HTTP/1.1 404 Not Found\r\n\r\n")

    thread = Thread(target=answer)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\0\0\x18\x04\0\x1b[31m\r\n", "does not speak HTTP; is it the address of `coordinator serve`?"),
        (b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n", "401: ; here: --api-key KEY"),
    ],
)
def test_other_answers_are_one_line_that_says_what_to_do(data: bytes, reason: str) -> None:
    """A worker's port, whose bytes stay out of the terminal; a missing key. /v1 of the OpenAI URL is no harm."""
    url, thread = answering(data)
    assert refusal("status", "--url", f"{url}/v1").endswith(reason)
    thread.join()


COMMANDS = ("run", "plan", "serve", "chat", "status", "devices")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole_in_80_columns(name: str) -> None:
    """No flag, variable or default is cut short."""
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"})
    assert max(map(len, result.output.splitlines())) <= 80
    words = result.output.replace(";", " ").replace("]", " ").split()
    commands: Any = typer.main.get_command(app)
    for option in commands.commands[name].params:
        if option.param_type_name == "option" and option.name != "help":
            assert {*option.opts, option.envvar} <= {word.rstrip(",") for word in words}, option.name
            if isinstance(option.default, int | float) and not isinstance(option.default, bool):
                assert f"default: {option.default}" in " ".join(words), option.name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_its_environment_twin(name: str) -> None:
    """P-28: every flag's environment twin exists, named like the flag."""
    commands: Any = typer.main.get_command(app)
    check_twins(commands.commands[name])


def test_every_option_of_the_worker_has_its_environment_twin() -> None:
    """P-28, for `rpc-worker`. What goes with a report has no twin: LAMINA_JSON must not turn a serving worker away."""
    check_twins(typer.main.get_command(worker_app), "self_test", "explain", "model", "as_json")


def check_twins(command: Any, *reports: str) -> None:
    """`--some-flag` can be said as LAMINA_SOME_FLAG; those that print something and exit need no twin."""
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    assert len(options) > 2
    for option in options:
        if option.name not in ("help", "version", "install_completion", "show_completion", *reports):
            assert option.envvar == "LAMINA_" + option.opts[0].removeprefix("--").replace("-", "_").upper(), option.name


# -- the configuration file


def run_probe(tmp_path: Path, text: str, *arguments: str, env: dict[str, str] | None = None) -> dict[str, object]:
    """What a command gets with this file; raises what the command line raises."""
    seen: dict[str, object] = {}
    probe = typer.Typer()

    @probe.command()
    def one(
        model: str = typer.Argument(...),
        port: int = typer.Option(8080, envvar="LAMINA_PORT"),
        workers: str = typer.Option("", envvar="LAMINA_WORKERS"),
        kv_dtype: str = typer.Option("f16", envvar="LAMINA_KV_DTYPE"),
        insecure: bool = typer.Option(False, "--insecure"),
        ping_s: float = typer.Option(15.0),
        config: Config = None,
    ) -> None:
        seen.update(model=model, port=port, workers=workers, kv_dtype=kv_dtype, insecure=insecure, ping_s=ping_s)

    @probe.command()
    def other(url: str = "", config: Config = None) -> None:
        """Its keys may stand in the same file."""

    path = tmp_path / "lamina.yaml"
    path.write_text(text)
    result = CliRunner().invoke(probe, ["one", "--config", str(path), *arguments], env=env)
    if result.exception is not None:
        raise result.exception
    return seen


def test_the_file_says_what_flags_can(tmp_path: Path) -> None:
    text = "model: m.gguf\nport: 99\nworkers: [a:1, 'b:2']\nkv-dtype: q8_0\ninsecure: true\nping_s: 2\nurl: http://x\n"
    assert run_probe(tmp_path, text) == {
        "model": "m.gguf",
        "port": 99,
        "workers": "a:1,b:2",
        "kv_dtype": "q8_0",
        "insecure": True,
        "ping_s": 2.0,
    }


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    text, environment = "model: m\nport: 1\n", {"LAMINA_PORT": "2"}
    assert run_probe(tmp_path, "model: m\n")["port"] == 8080
    assert run_probe(tmp_path, text)["port"] == 1
    assert run_probe(tmp_path, text, env=environment)["port"] == 2
    assert run_probe(tmp_path, text, "--port", "3", env=environment)["port"] == 3
    assert run_probe(tmp_path, text, "n", env=environment)["model"] == "n"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("port: 1\nprot: 2\n", 2, "unknown key 'prot'"),
        ("port: 1\n\nport: 2\n", 3, "given twice"),
        ("port: {a: 1}\n", 1, "single value"),
        ("workers:\n  - [a]\n", 2, "single value"),
        ("- a\n", 1, "key: value"),
        ("a: [\n", 2, "not valid YAML"),
        ("port: 1\nport-b: !!int b\n", 2, "not what its tag says"),
        ("port: 1\na: " + "[" * 5000, 2, "nested deeper"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason) as refused:
        run_probe(tmp_path, text, "m")
    assert f"lamina.yaml:{line}:" in str(refused.value)


def test_what_looks_like_a_date_is_text(tmp_path: Path) -> None:
    """YAML would make a date of it, and fail at the thirteenth month."""
    assert run_probe(tmp_path, "model: 2026-13-45\nworkers: 2026-01-02\n") == {
        **run_probe(tmp_path, "model: m\n"),
        "model": "2026-13-45",
        "workers": "2026-01-02",
    }


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_config(tmp_path / "none.yaml")


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert run_probe(tmp_path, "# nothing\n", "m")["port"] == 8080


def test_the_keys_are_the_flags(tmp_path: Path) -> None:
    """--json and --model-name, whatever the code calls them; `json` is no flag of `serve`, but one of another's."""
    path = tmp_path / "lamina.yaml"
    path.write_text("json: true\nmodel-name: tiny\nmemory: 1G\n")
    tiny = Path(__file__).parents[1] / "data" / "tiny_llama_tied.gguf"
    result = CliRunner().invoke(app, ["plan", str(tiny), "--config", str(path)])
    assert json.loads(result.output)["stages"][0]["free_bytes"] == 2**30
    assert "--insecure" in refusal("serve", str(tiny), "--config", str(path), "--host", "0.0.0.0")


def test_the_environment_twin_of_a_truth_value() -> None:
    """P-28: LAMINA_JSON and LAMINA_MEMORY do what --json and --memory do."""
    tiny = Path(__file__).parents[1] / "data" / "tiny_llama_tied.gguf"
    result = CliRunner().invoke(app, ["plan", str(tiny)], env={"LAMINA_JSON": "1", "LAMINA_MEMORY": "1G"})
    assert json.loads(result.output)["stages"][0]["free_bytes"] == 2**30


def test_serve_takes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command: values of the file are checked like flags."""
    path = tmp_path / "lamina.yaml"
    path.write_text("host: 0.0.0.0\n")
    assert "--insecure" in refusal("serve", str(smollm2_path()), "--config", str(path))
    assert server_commands.serve.__name__ == "serve"
