"""Check progress without a terminal, and the threads of a run that shares its cores."""

import io
import os
import re
import sys
import time

import pytest
import torch
from kit import forks

pytest.importorskip("rich")

from rich.console import Console

import thread_choice
from gdn_bench.commands.progress import LineReport, progress_line, show_progress
from thread_choice import ThreadChoice, ThreadControl, choose_threads


def test_a_line_has_count_note_time_and_what_is_left():
    line = progress_line("train", 120, 220, "loss 2.31", 45.0)
    assert line == "train 120/220, loss 2.31, 45 s, about 38 s left"
    # a run that goes on at step 100 has done 20 of its own
    assert progress_line("train", 120, 220, "", 10.0, first=100) == "train 120/220, 10 s, about 50 s left"
    assert progress_line("spec", 3, None, "", 200.0) == "spec 3, 3 min 20 s"
    assert progress_line("compile", 0, None, "", 1.0) == "compile, 1 s"


def test_a_step_that_takes_long_is_reported_while_it_runs():
    stream = io.StringIO()
    with LineReport(interval=0.05, stream=stream) as report:
        report("train", 0, 4, "")
        report("train", 1, 4, "loss 5.00")
        time.sleep(0.4)
        report("train", 4, 4, "loss 2.00")
        report("write", 0, 1, "")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train 0/4, 0 s" and lines[-1] == "write 0/1, 0 s"
    assert lines[-2].startswith("train 4/4, loss 2.00, ")
    during = lines[1:-2]
    assert 2 <= len(during) <= 8 and all("train 1/4, loss 5.00" in x and "left" in x for x in during)


def test_a_terminal_has_bars_with_what_is_left(monkeypatch):
    """Cut a long note on 80 columns, never the count or the times."""
    stream = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status = Console(file=stream, force_terminal=True, width=80, color_system=None)
    with show_progress(status) as report:
        report("verify", 0, 141, "")
        report("verify", 3, 141, "fp32 " + "strong/negative 6 packed in 139 heads " * 3)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    last = [line for line in plain.split("\r") if "3/141" in line]
    assert last and re.search(r"verify fp32 strong.* 3/141 +0:00:0\d +(\d:\d\d:\d\d|-:--:--)", last[-1])


def test_many_steps_are_few_lines():
    stream = io.StringIO()
    with LineReport(interval=10, stream=stream) as report:
        for step in range(1000):
            report("train", step + 1, 1000, "")
    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.slow
def test_a_command_reports_on_a_pipe():
    """Run verify in a process of its own: lines on stderr, JSON alone on stdout."""
    command = ["-m", "gdn", "verify", "--set", "quick", "--max-cases", "2", "--device", "cpu"]
    done = forks.python(*command, "--dtype", "fp32", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("verify 0/2, fp32 strong/") and "verify 2/2" in done.stderr
    assert done.stdout.startswith("{")


@pytest.fixture
def machine(monkeypatch):
    """Pretend a machine of two cores: the time of the test by threads, and the free cores, are given."""
    found = {"free": 2, 1: 1.0, 2: 0.6}
    monkeypatch.setattr(thread_choice, "count_cores", lambda: 2)
    monkeypatch.setattr(thread_choice, "count_free_cores", lambda: found["free"])
    monkeypatch.setattr(thread_choice, "time_threads", lambda threads, limit: found[threads])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield found
    torch.set_num_threads(before)


def test_the_faster_number_of_threads_is_chosen(machine):
    assert choose_threads(2) == ThreadChoice(2, 2, 2, 2, {1: 1.0, 2: 0.6})
    said = str(choose_threads(2))
    assert said == "2 of 2 threads: 2 of 2 cores free, a test takes 1000 ms with 1 and 600 ms with 2"
    machine[2] = 4.1
    assert choose_threads(2).threads == 1
    # a gain that is noise is none
    machine[2] = 0.95
    assert choose_threads(2).threads == 1


@pytest.mark.parametrize("free", [0, 1])
def test_there_are_never_more_threads_than_free_cores(machine, free):
    machine["free"] = free
    assert choose_threads(2) == ThreadChoice(1, 2, 2, free, {})
    assert str(choose_threads(2)) == f"1 of 2 threads: {free} of 2 cores free"


def test_a_run_that_becomes_slow_goes_on_with_one_thread(machine):
    shown: list[str] = []
    control = ThreadControl(shown.append)
    control.choose()
    assert torch.get_num_threads() == 2 and len(shown) == 1
    for seconds in (2.0, 0.3, 0.3, 5.0, 0.3, 0.5, 5.0):
        control.observe(seconds)
    assert torch.get_num_threads() == 2
    control.observe(6.0)
    assert torch.get_num_threads() == 1
    assert shown[1:] == ["1 of 2 threads: a step takes 20 times as long as before"]
    # the next part looks again
    control.choose()
    assert torch.get_num_threads() == 2 and len(shown) == 3


def test_a_choice_takes_a_moment_and_leaves_the_threads():
    before, start = torch.get_num_threads(), time.monotonic()
    choice = choose_threads(2)
    assert choice.threads in (1, 2) and torch.get_num_threads() == before
    assert 0 <= choice.free <= choice.cores <= (os.cpu_count() or 1)
    assert time.monotonic() - start < 30


def test_one_thread_needs_no_choice(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    control = ThreadControl(pytest.fail)
    control.choose()
