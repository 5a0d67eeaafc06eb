# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp`` as a process: exit codes, commands that work without torch, Ctrl-C, a reader that goes away."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support.cli_runs import run, save, start

import bytecheckpoint

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from bytecheckpoint.cli.app import run
sys.argv = ["bcp", *sys.argv[1:]]
code = run()
assert not [name for name in sys.modules if name.startswith("torch.")]
sys.exit(code)
"""


def test_help_and_version() -> None:
    assert run("--version").output == f"bcp {bytecheckpoint.__version__}\n"
    listed = re.findall(r"^  (\w+)  ", run("--help").output.partition("Commands:")[2], re.MULTILINE)
    commands = "convert copy diff digest doctor drain du holder info ls pin prune report show steps sweep top verify"
    assert listed == [*commands.split(), "why"]
    assert "..." not in run("--help").output.partition("Commands:")[2], "a summary is cut"
    for name in listed:
        text = run(*name.split(), "--help").output
        assert "--json" in text
        assert f"Example:\n    bcp {name} " in text


def test_a_command_that_is_nearly_one() -> None:
    said = run("prun", "x")
    assert said.exit_code == 2
    assert said.output == "bcp: No such command 'prun'; did you mean 'prune'? See bcp --help\n"
    assert "did you mean" not in run("zzz").output


@pytest.mark.parametrize("arguments", [["ls"], ["verify", "--threads", "0", "a"], ["nothing"], ["ls", "--what", "a"]])
def test_wrong_usage_is_one_line(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("bcp: ")
    assert result.stderr.count("\n") == 1


def test_without_torch(tmp_path: Path) -> None:
    path = save(tmp_path)
    for arguments, code in (
        (["ls", path], 0),
        (["verify", path], 0),
        (["diff", path, path, "--structure-only"], 0),
        (["show", path, "step"], 2),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *arguments],
            env={**os.environ, "PYTHONPATH": str(Path(bytecheckpoint.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == code, ran.stderr
        assert ran.stderr.count("\n") == (code != 0)


def test_exit_codes_of_a_process(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__9_9.distcp").touch()
    for arguments, code in ((["ls", path], 0), (["verify", path], 1), (["verify", "absent"], 2)):
        process = start(*arguments)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert "Traceback" not in err


@pytest.mark.parametrize("options", [[], ["--no-progress"]])
def test_a_terminal_gets_a_bar(options: list[str], tmp_path: Path) -> None:
    """The bar is on stderr, and it is gone at the end."""
    path = save(tmp_path / "ckpt")
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    try:
        # With an interval of 0, tqdm draws the bar anew at each update.
        process = start("verify", path, *options, stderr=theirs, environment={"TQDM_MININTERVAL": "0"})
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the last process that had the terminal open has ended
            while piece := os.read(ours, 4096):
                shown += piece
        out, _ = process.communicate(timeout=60)
    finally:
        os.close(ours)
    assert process.returncode == 0
    assert out.startswith(f"{path}: whole")
    if options:
        assert shown == b""
    else:
        assert shown.startswith(b"\rverifying: ")
        assert b"100%" in shown
        assert shown.rpartition(b"100%")[2].rpartition(b"\r")[2] == b""


def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C prints one line, and the exit code is 130."""
    code = f"""
import signal, sys
from bytecheckpoint.cli import app
import bytecheckpoint.cli.verify as verify
def interrupted(*arguments, **options):
    signal.raise_signal(signal.SIGINT)
verify.verify = interrupted
sys.argv = ["bcp", "verify", {str(tmp_path)!r}]
sys.exit(app.run())
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(bytecheckpoint.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "bcp: interrupted\n")


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    path = save(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    process = start("ls", path, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGPIPE
    assert err == ""
