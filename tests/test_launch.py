"""Launching: numbers compile nothing, alignment and None are seen, plans are found again."""

import importlib.util
import inspect
import linecache
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from kit import api, forks
from kit.failures import Failures
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, code_generator
from triton.compiler.code_generator import CodeGenerator
from triton.experimental import gluon
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from gdn.backends.triton import launch
from gdn.backends.triton.launch import (
    Launch,
    LaunchSequence,
    PlanCache,
    background,
    binaries,
    device,
    launches,
    parallel,
    precompile,
    saved,
    unit_of,
)
from gdn.backends.triton.launch.compilations import compilations
from gdn.backends.triton.rule import choose
from gdn.backends.triton.rule import run as rule
from gdn.problem import parse
from gdn.testing import Case, inputs, packed, rows


@launch.kernel
def _scale(x_ptr, bias_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + i, mask=i < n, other=0.0) * factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, y, mask=i < n)


@launch.kernel
def _wrong(x_ptr, n):
    tl.store(x_ptr, tl.static_assert(False))


def scaled(n, factor):
    return Launch(_scale, triton.cdiv(n, 16), (n, factor), {"BLOCK": 16}, num_warps=1)


@pytest.mark.interpret
def test_first_and_later_launches_aligned_or_not(triton_device):
    x = torch.randn(101, device=triton_device)
    plain, biased = scaled(100, 3.0), scaled(100, 3.0)
    for a in (x[:100], x[:100], x[1:], x[:100], 2 * x[1:]):
        y = torch.full_like(x, -1.0)
        plain(a, None, y)
        assert torch.equal(y[:100], a * 3.0) and y[100] == -1
        biased(a, x[:100], y)
        torch.testing.assert_close(y[:100], a * 3.0 + x[:100])


@pytest.mark.interpret
def test_an_empty_grid_launches_nothing(triton_device):
    y = torch.zeros(4, device=triton_device)
    scaled(0, 1.0)(y, None, y)


@pytest.mark.gpu
def test_no_number_is_specialised_on(monkeypatch):
    """1, multiples of 16, negative ones and zero are numbers like all others."""
    x = torch.randn(4096, device="cuda")
    y, compiled = torch.empty_like(x), []
    scaled(100, 3.0)(x, None, y)
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["fn"].name)
    )
    for n, factor in ((1, 1.0), (16, 0.0), (4096, -2.5), (17, 1e9)):
        scaled(n, factor)(x, None, y)
        assert torch.equal(y[:n], x[:n] * factor)
    assert not compiled


@pytest.mark.gpu
def test_the_current_stream_is_used():
    x, y = torch.ones(100, device="cuda"), torch.zeros(100, device="cuda")
    go = scaled(100, 2.0)
    go(x, None, y)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(5.0)
        go(x, None, y)
    stream.synchronize()
    assert bool((y == 10).all())


@pytest.mark.interpret
def test_a_chain_of_launches_aligned_or_not(triton_device):
    x = torch.randn(101, device=triton_device)
    first, none, last = scaled(100, 3.0), scaled(0, 7.0), scaled(100, 2.0)
    chain = LaunchSequence(
        lambda t: [(first, (t[0], None, t[2])), (none, (t[3], t[0])), (last, (t[2], t[0], t[3]))]
    )
    for a in (x[:100], x[:100], x[1:], x[:100], 2 * x[1:]):
        y, z = torch.full((2, 112), -1.0, device=triton_device)
        chain([a, x, y, z, None])
        assert torch.equal(y[:100], a * 3.0) and y[100] == -1 and z[100] == -1
        torch.testing.assert_close(z[:100], a * 7.0)


def test_a_compiled_chain_hands_on_what_its_launches_would(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: (device, 7), raising=False)
    monkeypatch.setattr(Launch, "_dispatch", lambda self, tensors: made.append((self, tensors)))
    made, noted = [], []
    launches = scaled(100, 3.0), scaled(0, 1.0), scaled(48, 2.0)
    for launch_, name in zip(launches, "abc", strict=True):
        launch_._device, launch_._trailing = 1, launch_.scalars
        launch_._call = lambda *given, name=name: made.append((name, *given))

    def steps(t):
        return zip(launches, ((t[0], None, t[3]), (t[3], t[0]), (t[3], t[0], t[0])), strict=True)

    chain, x = LaunchSequence(steps), torch.empty(3, 16)
    chain([x[0], None, x[2], x[1]])
    assert [given[:3] for given in made] == [("a", 7, (1, 7)), ("c", 3, (1, 7))]
    assert made[0][3] == (x[0].data_ptr(), None, x[1].data_ptr(), 100, 3.0)
    chain.steps = None
    for tensors in (x[1], None, None, x[0]), (x[0], None, None, x[1]):
        chain(tensors)
    assert made[4:] == made[:2] and made[2:4] != made[:2]
    chain.steps = steps
    chain([x[0, 1:], None, None, x[1]])
    assert made[6][0] is launches[0] and made[6][1][1] is None and made[7][0] is launches[2]
    with launch.record_launches(noted):
        chain([x[0], None, None, x[1]])
    assert len(made) == 8 and [step[0] for step in noted] == [launches[0], launches[2]]
    # one that is not compiled: all go as they would alone
    launches[2]._call = None
    monkeypatch.setattr(Launch, "_launch_first", lambda self, tensors: made.append((self, tensors)))
    later = LaunchSequence(steps)
    for _ in range(2):
        later([x[0], None, None, x[1]])
    assert len(made) == 12 and [made[i][0] for i in (9, 11)] == [launches[2]] * 2


def test_recorded_launches_are_not_run():
    x, go = torch.ones(100), scaled(100, 2.0)
    with launch.record_launches([]) as kept:
        go(x, None, x)
    assert kept == [(go, (x, None, x))] and bool((x == 1).all())


def test_plans_are_made_once_and_their_number_is_bounded():
    plans, made = PlanCache(limit=2), []
    for key in ("a", "b", "a", "b", "c", "a"):
        assert plans.get(key, lambda key=key: made.append(key) or key) == key
    assert made == ["a", "b", "c", "a"] and len(plans.plans) == 2


@pytest.mark.parametrize(
    "strides, unit", [((64, 4096), 16), ((24,), 8), ((6, 4), 2), ((7, 8), 1), ((0,), 16), ((), 16)]
)
def test_unit_of(strides, unit):
    assert unit_of(*strides) == unit and all(s % unit == 0 for s in strides)


def test_a_machine_is_imagined_where_there_is_none():
    assert launch.machine(torch.device("cpu")) == launch.Machine("cuda", 90, 132, 227 * 1024)
    with launch.device_guard(torch.device("cpu")):
        pass


@pytest.mark.interpret
@pytest.mark.parametrize("lengths", [rows(200), packed(70, 0, 129, 1, tail=9)], ids=["dense", "packed"])
def test_in_what_parts_gradients_are_made_changes_no_bit(monkeypatch, poison, triton_device, lengths):
    case = Case(sizes=(32, 48), heads=(1, 2), lengths=lengths, use_qk_l2norm_in_kernel=True, state="wide")
    given = inputs(case, torch.float32, device=triton_device)
    problem = parse(**given.tensors, **given.options)
    saved = rule.chunk_forward(problem, True)[2]
    chosen = choose.backward_tiles

    def gradients(group):
        monkeypatch.setattr(choose, "backward_tiles", lambda *a: replace(chosen(*a), group=group))
        rule._backwards.plans.clear()
        return rule.chunk_backward(problem, saved, given.do, given.dfinal_state)

    whole = gradients(1000)
    for group in (1, 2, 5):
        for name, x in vars(gradients(group)).items():
            assert (x is None) == (getattr(whole, name) is None)
            assert x is None or torch.equal(x, getattr(whole, name)), (group, name)
    rule._backwards.plans.clear()


def compile_module_from_src(**given):
    """Stand for Triton's function, by the name that `build_launcher` looks for: there is no module."""


class _NoLauncher:
    """Stand for Triton's class of launchers, whose C module needs the libraries of a GPU."""

    def __init__(self, source, metadata):
        compile_module_from_src(src=source, name="__triton_launcher")


class _NoGPU:
    """As much of a driver as compiling wants."""

    launcher_cls = _NoLauncher

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def ahead(monkeypatch, tmp_path):
    """Return a background of its own for compilations on an imagined GPU, which starts at once."""
    monkeypatch.setattr(triton.runtime.driver, "_active", _NoGPU())
    # no binary is loaded
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda binary: None)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(precompile, "_compiled_kinds", set())
    # what tests before have compiled
    _scale.device_caches.clear()
    for module in (precompile, launches):
        monkeypatch.setattr(module, "device_guard", lambda device: nullcontext())
    monkeypatch.setattr(background, "QUIET", 0.0)
    # a kernel is known by its binary's name, not only where it is one of gdn's
    monkeypatch.setattr(saved, "PACKAGE", __name__)
    own = background.Background(launches.BACKGROUND._run_one)
    for module in (precompile, launches):
        monkeypatch.setattr(module, "BACKGROUND", own)
    yield own
    own.stop()


CUDA = torch.device("cuda", 0)


def watch_compilations(monkeypatch):
    """Return a list that gets the thread of each compilation."""
    compiled = []
    hook = lambda **info: compiled.append(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    return compiled


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("by", ["background", "finish"])
def test_binaries_compiled_ahead_are_found_again(ahead, monkeypatch, failures, by):
    """Each once; a step that cannot be compiled is left for its launch, and no tensor is kept."""
    monkeypatch.setattr(background, "QUIET", 0.0 if by == "background" else 60.0)
    x, compiled = torch.randn(100), watch_compilations(monkeypatch)
    plain, wrong = (x, None, x), Launch(_wrong, 1, (1,), {}, num_warps=1)
    steps = [(scaled(100, 3.0), plain), (scaled(100, 3.0), (x, x, x)), (scaled(7, 1.0), (x[1:], None, x))]
    expected = ["in the background failed.*CompileTimeAssertionFailure"] if by == "background" else []
    with failures.expects(*expected):
        launch.compile_ahead(CUDA, "kind", lambda: [*steps, (wrong, (x,))])
        launch.compile_ahead(CUDA, "kind", lambda: pytest.fail("met before"))
        if by == "finish":
            assert all(t.is_meta for _, (_, given) in ahead._waiting.values() for t in given if t is not None)
            precompile.finish_ahead()
        else:
            wait_until(lambda: not ahead._waiting and ahead._thread is None)
    assert len(compiled) == 2 and (set(compiled) == {"gdn compiles ahead"}) == (by == "background")
    for go, tensors in steps:
        go.compile(tensors)
    assert len(compiled) == 2
    with pytest.raises(triton.CompilationError):
        # Triton 3.6 compiles it again, later ones have kept what went wrong
        wrong.compile((x,)).result()


def test_a_call_compiles_its_own_binaries_before_the_background_does(ahead, monkeypatch):
    """A call takes its jobs from the background, which waits until the call and a pause are over."""
    monkeypatch.setattr(background, "QUIET", 1.0)
    x, compiled = torch.randn(100), watch_compilations(monkeypatch)
    own, other = (scaled(100, 3.0), (x, None, x)), (scaled(100, 3.0), (x, x, x))
    launch.compile_ahead(CUDA, "kind", lambda: [other, own])
    launches.compile_now(CUDA, [own])
    ended = time.monotonic()
    assert len(compiled) == 1 and "gdn compiles ahead" not in compiled and len(ahead._waiting) == 1
    wait_until(lambda: len(compiled) == 2)
    assert compiled[1] == "gdn compiles ahead" and time.monotonic() - ended > 0.9


def test_a_call_waits_for_what_the_background_compiles_already():
    """Else it would compile the same again; other jobs wait until the call is over."""
    began, go, ended = threading.Event(), threading.Event(), []

    def run(job):
        began.set()
        go.wait(60)
        ended.append(job)

    own = background.Background(run)
    with patch.object(background, "QUIET", 0.0):
        own.add({1: "first", 2: "second", 3: "third"})
        assert began.wait(60)
        threading.Timer(0.1, go.set).start()
        with own.call([1, 3]):
            assert ended == ["first"]
            time.sleep(0.1)
            assert ended == ["first"]
        wait_until(lambda: own._thread is None)
    assert ended == ["first", "second"]


def test_a_system_without_more_threads_keeps_jobs(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    own = background.Background(lambda job: None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    own.add({1: "first"})
    assert own._thread is None and own.take() == ["first"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="expected a system that forks")
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    """Neither the background's job nor the lock of a kernel that is traced exists there."""
    began, go = threading.Event(), threading.Event()
    own = background.Background(lambda job: began.set() or go.wait(60))
    with patch.object(background, "QUIET", 0.0), parallel._TRACING:
        own.add({1: "first", 2: "second"})
        assert began.wait(60)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            holder = threading.Thread(target=lambda: parallel._TRACING.acquire() and os._exit(7))
            own.take() or holder.start()
            time.sleep(10)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        go.set()
        assert own.take() == ["second"]


def test_a_call_that_is_interrupted_while_it_waits_is_no_call_any_more(monkeypatch):
    own = background.Background(lambda job: None)

    def interrupt(condition):
        raise KeyboardInterrupt

    monkeypatch.setattr(own._changed, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt), own.call([1]):
        pass
    # else no job would ever start
    assert own._num_calls == 0


def test_a_process_ends_while_kernels_wait_for_the_background():
    """The thread ends with the job that it runs, and a job that raises ends nothing."""
    text = """
import time
from gdn.backends.triton.launch import background
background.QUIET = 0.0
def run(job):
    time.sleep(0.2)
    print(job, flush=True)
    raise ValueError
own = background.Background(run)
own.add({i: i for i in range(1000)})
time.sleep(0.5)
"""
    done = forks.python("-c", text, timeout=60, check=True)
    assert done.stderr == "" and 1 <= len(done.stdout.split()) <= 100


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="expected a launcher for each kernel")
def test_launchers_are_compiled_beside_their_kernels_and_not_loaded(ahead, monkeypatch):
    """A descriptor's launcher as well, before the compiler says how it is laid out; a launch finds both."""
    from triton.backends.nvidia import driver

    def make(*types):
        names = [f"x{i}" for i in range(len(types))]
        function = SimpleNamespace(arg_names=names)
        return SimpleNamespace(fn=function, constants={}, signature=dict(zip(names, types, strict=True)))

    def build_one(name, text, folder, *rest):
        (Path(folder) / "built").write_bytes(b"")
        built.append(threading.current_thread() is threading.main_thread())
        return str(Path(folder) / "built")

    def compile_it(src, metas):
        def compile_source():
            wait_until(lambda: built)
            return SimpleNamespace(src=src, metadata=parallel._Expected(metas))

        return compile_source

    built, loaded = [], []
    monkeypatch.setattr(triton.knobs.build, "impl", build_one)
    monkeypatch.setattr(driver, "library_dirs", list)
    active = SimpleNamespace(launcher_cls=driver.CudaLauncher)
    monkeypatch.setattr(type(triton.runtime.driver), "active", active)
    for metas, types in (([], ("*fp32", "i32")), (["a layout"], ("tensordesc<bf16[64, 64],x>", "*fp32"))):
        built.clear()
        source = make(*types)
        with parallel._Compiler(1) as pool:
            kernel = pool.submit(compile_it(source, metas)).result()
        assert built == [False]
        with monkeypatch.context() as patch_:
            load = lambda name, path: loaded.append(Path(path).name) or SimpleNamespace(launch=None)  # noqa: E731
            patch_.setattr(triton.runtime.build, "_load_module_from_path", load)
            driver.CudaLauncher(kernel.src, kernel.metadata)
        assert built == [False] and len(loaded) == 1
        loaded.clear()
    # another than was expected is compiled, too
    parallel.build_launcher(source, parallel._Expected(None))
    assert built == [False, True]


def test_a_triton_without_launchers_of_kernels_compiles_none(ahead, monkeypatch):
    """Triton 3.9 has one function for all kernels: nothing fails, and the constructor does not run."""
    namespace = {}
    exec("def __init__(self, source, metadata): raise AssertionError", namespace)
    monkeypatch.setattr(_NoGPU, "launcher_cls", type("Launcher", (), {"__init__": namespace["__init__"]}))
    parallel.build_launcher(None, None)


def test_launches_of_a_sequence_are_compiled_together(ahead, monkeypatch):
    """The first call compiles all its launches before it runs one; those that the background has, too."""
    x, together, ran = torch.randn(100), [], []
    monkeypatch.setattr(launches, "compile_all", lambda steps: together.append([one for one, _ in steps]))
    monkeypatch.setattr(Launch, "_dispatch", lambda one, tensors: ran.append(one) or _Handle)
    monkeypatch.setattr(launches, "direct_call", lambda compiled: lambda *arguments: ran.append(compiled))
    monkeypatch.setattr(launches, "find_binary", lambda one, tensors: None)
    first, empty, second = scaled(100, 3.0), replace(scaled(100, 3.0), grid=0), scaled(7, 1.0)
    second.seconds = 2.0
    sequence = LaunchSequence(lambda tensors: [(one, (*tensors, None)) for one in (first, empty, second)])
    monkeypatch.setattr(launches, "prepare", lambda steps, tensors: None)
    sequence([x, x])
    # then each by itself, where it finds the binary
    assert together == [[second, first], [first], [second]] and ran == [first, second]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    sequence([x, x])
    assert len(together) == 3 and ran[2:] == [_Handle, _Handle]


class _Handle:
    """Stand for a compiled kernel."""


def test_what_waits_is_compiled_before_compilations_and_folders_end(ahead, monkeypatch, tmp_path):
    """A count has the kernels of its own calls, and so has a folder; what waited before is in neither."""
    monkeypatch.setattr(background, "QUIET", 60.0)
    monkeypatch.setattr(binaries, "identity", dict)
    x = torch.randn(100)
    steps = [(scaled(100, 3.0), (x, None, x)), (scaled(100, 3.0), (x, x, x)), (scaled(100, 3), (x, x, x))]
    plain, biased, of_integers = ([step] for step in steps)
    launch.compile_ahead(CUDA, 1, lambda: plain)
    with compilations() as names:
        assert names == []
        launch.compile_ahead(CUDA, 2, lambda: biased)
    assert names == ["_scale"] and not ahead._waiting
    launch.compile_ahead(CUDA, 3, lambda: of_integers)
    with binaries.separate_cache(tmp_path / "folder"):
        assert not ahead._waiting
        launch.compile_ahead(CUDA, 4, lambda: [(replace(scaled(100, 3.0), num_warps=2), (x, None, x))])
    assert len(list((tmp_path / "folder").rglob("*.cubin"))) == 1 and not ahead._waiting


def test_a_later_launch_is_compiled_with_the_next_one(ahead, monkeypatch):
    """By the same thread alone, once, and without its tensors."""
    together = []
    monkeypatch.setattr(launches, "compile_all", lambda steps: together.append(steps))
    x, first, last = torch.randn(100), scaled(100, 3.0), scaled(7, 1.0)
    launches.compile_with_next([(last, (x, None, x))])
    thread = threading.Thread(target=launches.compile_now, args=(CUDA, [(first, (x, None, x))]))
    thread.start()
    thread.join()
    for _ in range(2):
        launches.compile_now(CUDA, [(first, (x, None, x))])
    assert [[one for one, _ in steps] for steps in together] == [[first], [first, last], [first]]
    assert together[1][1][1][0].is_meta and together[1][1][1][0].shape == x.shape


def test_what_is_compiled_ahead_is_loaded_by_one_thread(ahead, monkeypatch):
    """Threads that load launchers can take each other's; a binary belongs to the device it is loaded on.

    Those that take longest come first.
    """
    monkeypatch.setattr(background, "QUIET", 60.0)
    loaded, built, order, inside = [], [], [], []

    class Compiled:
        src = metadata = None

        @property
        def run(self):
            # each once beside its kernel, and once after it
            assert len(built) == 10
            loaded.append((threading.current_thread(), list(inside)))

    @contextmanager
    def on(device):
        inside.append(device)
        yield
        inside.pop()

    steps = [(replace(scaled(100 + i, 1.0), seconds=i % 3), (torch.randn(100),)) for i in range(5)]

    def compiled(self, tensors):
        order.append(self.seconds)
        submit = active_mode.get().submit
        # one in Triton 3.6 to 3.8, two in 3.9
        callbacks = [lambda *_: None] * (len(inspect.signature(submit).parameters) - 2)
        src = SimpleNamespace(signature={})
        return submit(id(self), lambda: src and Compiled(), *callbacks)

    monkeypatch.setattr(precompile, "device_guard", on)
    monkeypatch.setattr(precompile, "job_key", lambda device, one, tensors: id(one))
    monkeypatch.setattr(parallel, "build_launcher", lambda source, metadata: built.append(source))
    monkeypatch.setattr(launch.Launch, "compile", compiled)
    device = torch.device("cuda", 1)
    launch.compile_ahead(device, "kind", lambda: steps)
    precompile.finish_ahead()
    assert len(built) == 10 and loaded == [(threading.current_thread(), [device])] * 5
    assert order == [2, 1, 1, 0, 0]


def test_who_meets_what_another_thread_compiles_waits(ahead, monkeypatch):
    """Else it would compile that again."""
    done, seen = [], []

    def steps():
        time.sleep(0.05)
        done.append(None)
        return []

    def call(_):
        launch.compile_ahead(torch.device("cuda", 0), "kind", steps)
        seen.append(len(done))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))
    assert seen == [1] * 4


def test_no_two_kernels_are_traced_at_once(monkeypatch):
    """Classes that override make_ir, and call that of their base, are locked as well."""
    inside, met = [], []

    class Source:
        def make_ir(self, text):
            inside.append(text)
            time.sleep(0.01)
            met.append(len(inside))
            inside.remove(text)
            return text

    class Other(Source):
        def make_ir(self, text):
            return Source.make_ir.__wrapped__(self, text)

    class Third(Source):
        def make_ir(self, text):
            return super().make_ir(text)

    monkeypatch.setattr(parallel, "ASTSource", Source)
    before = [vars(source)["make_ir"] for source in (Source, Other, Third)]

    def trace(source, i):
        # the caller's context and those of threads overlap
        with parallel.trace_one_at_a_time() if i % 2 else nullcontext():
            return source.make_ir(i)

    with ThreadPoolExecutor(8) as pool:
        sources = [(Source, Other, Third)[i % 3]() for i in range(16)]
        with parallel.trace_one_at_a_time():
            texts = pool.map(trace, sources, range(16))
        assert list(texts) == list(range(16))
    assert met == [1] * 16
    assert [vars(source)["make_ir"] for source in (Source, Other, Third)] == before


def test_tracing_leaves_warning_filters_alone(ahead, monkeypatch):
    """Triton sets and restores them at each node, for all threads."""
    changed, visit = [], CodeGenerator.visit
    monkeypatch.setattr(
        CodeGenerator, "visit", lambda self, node: changed.append(warnings.filters) or visit(self, node)
    )
    x, before = torch.randn(100), code_generator.warnings
    launches.compile_now(CUDA, [(scaled(100, 3.0), (x, None, x))])
    assert len(changed) > 10 and all(x is warnings.filters for x in changed)
    assert code_generator.warnings is before is warnings


@pytest.mark.parametrize("is_broken", [False, True])
def test_triton_has_its_own_methods_after_compiling_ahead(ahead, monkeypatch, is_broken):
    """`make_ir` of Triton's sources is replaced only while threads compile, also if compiling raises."""
    monkeypatch.setattr(background, "QUIET", 60.0)
    sources = (parallel.ASTSource, *parallel.ASTSource.__subclasses__())
    before, during = [vars(x).get("make_ir") for x in sources], []
    compile_one = Launch.compile

    def compiled(self, tensors):
        during.append([vars(x).get("make_ir") for x in sources])
        if is_broken:
            raise RuntimeError("no compiler")
        return compile_one(self, tensors)

    monkeypatch.setattr(Launch, "compile", compiled)
    x = torch.randn(100)
    launch.compile_ahead(CUDA, "kind", lambda: [(scaled(100, 3.0), (x, None, x))])
    with pytest.raises(RuntimeError, match="no compiler") if is_broken else nullcontext():
        precompile.finish_ahead()
    assert during and all(x is None or x is not y for x, y in zip(before, during[0], strict=True))
    assert [vars(x).get("make_ir") for x in sources] == before


@pytest.mark.gpu
def test_a_second_device_before_the_current_one(monkeypatch):
    """What is compiled ahead for it must not be loaded, or kept, for the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    monkeypatch.setattr(precompile, "_compiled_kinds", set())
    # sizes that no other test has, so that nothing was compiled before
    q, k, v = torch.randn(3, 6, 2, 52), torch.randn(3, 6, 2, 52), torch.randn(3, 6, 4, 44)
    k, pool, found = torch.nn.functional.normalize(k, dim=-1), torch.randn(3, 4, 44, 52), []
    for name in ("cuda:1", "cuda:0", "cuda:1"):
        state = pool.to(name)
        x = (t.to(name) for t in (q, k, v))
        o = api.decode(*x, state, state_v_first=True, exact_packet=False, backend="triton")
        found.append((o.cpu(), state.cpu()))
    for o, state in found[1:]:
        assert torch.equal(o, found[0][0]) and torch.equal(state, found[0][1])


FUNCTIONS = """
from gdn.backends.hopper import gluon
from gdn.backends.triton.launch import jit, kernel

@jit
def twice(x):
    "Return 2 x."
    return x + x

@kernel
def twice_kernel(x_ptr, n, N: gluon.gl.constexpr):
    return twice(x_ptr)

@gluon.jit
def thrice(x):
    return x + x + x
"""


@pytest.fixture
def functions(tmp_path):
    """Return functions of a new module, those of Triton's decorators on them, and the module's file."""
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    spec = importlib.util.spec_from_file_location("functions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    triton_functions = (
        triton.jit(module.twice.fn),
        triton.jit(module.twice_kernel.fn, do_not_specialize=["n"]),
        gluon.jit(module.thrice.fn),
    )
    return (module.twice, module.twice_kernel, module.thrice), triton_functions, path


@pytest.mark.parametrize("edit", [None, "# a line more" + FUNCTIONS, ""], ids=["same", "edited", "emptied"])
def test_source_is_read_late_and_as_it_was_imported(functions, edit):
    """An import reads no source; the first use makes of a function what Triton's decorator returns."""
    for x, expected in zip(*functions[:2], strict=True):
        assert type(x) is not type(expected) and isinstance(x, type(expected))
        assert (x.__name__, x.__doc__, x.arg_names) == (
            expected.__name__,
            expected.__doc__,
            expected.arg_names,
        )
    if edit is not None:
        functions[2].write_text(edit)
    lines = linecache.getlines(str(functions[2]))
    for x, expected in zip(*functions[:2], strict=True):
        assert isinstance(x, launch.kernels.Unread)
        assert x.src == expected.src and type(x) is type(expected)
        names = ("raw_src", "starting_line_number", "do_not_specialize", "arg_names", "cache_key")
        assert [getattr(x, name) for name in names] == [getattr(expected, name) for name in names]
        assert vars(x).keys() == vars(expected).keys()
    assert linecache.getlines(str(functions[2])) == lines


def test_threads_read_the_source_of_a_function_once(functions, monkeypatch):
    """A thread that needs a function while another one constructs it waits until it is whole."""
    constructed, construct = [], JITFunction.__init__

    def slowly(self, *args, **options):
        construct(self, *args, **options)
        constructed.append(self)
        del self.arg_names
        time.sleep(0.05)
        self.arg_names = ["x"]

    monkeypatch.setattr(JITFunction, "__init__", slowly)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: (functions[0][0].src, functions[0][0].arg_names), range(4)))
    assert found == [(functions[1][0].src, ["x"])] * 4
    assert len(constructed) == 1


def test_an_attribute_that_is_set_first_is_kept(functions):
    hooks = [print]
    functions[0][1].pre_run_hooks = hooks
    assert functions[0][1].pre_run_hooks is hooks


def test_no_module_uses_the_decorators_of_triton():
    """They would read the source at the import."""
    backends = Path(launch.__file__).parents[2]
    found = [
        path.name
        for path in backends.rglob("*.py")
        if re.search(r"^@(triton|gluon)\.jit", path.read_text(), re.M)
    ]
    assert backends.name == "backends" and not found


def test_a_function_without_a_file_fails_as_triton_does():
    """Its source could not be read later either."""
    values = {}
    exec("def f(x):\n    return x", values)
    with pytest.raises(ValueError, match="should be defined in a Python file"):
        launch.jit(values["f"])


def test_the_fields_of_structs_are_part_of_a_kernels_cache_key():
    """Triton leaves them out; two fields swapped would find the stale binary in the cache on disk."""
    from gdn.backends.triton.serving import structs

    constants = structs.group_constants
    key, fields = constants.cache_key, structs.FIELDS
    assert all(f"'{struct.__name__}', {struct._fields}" in fields.value for struct in structs.STRUCTS)
    assert "FIELDS" in {name for name, _ in constants.used_global_vals}
    try:
        constants.fn.__globals__["FIELDS"], constants.hash = tl.constexpr("other fields"), None
        assert constants.cache_key != key
    finally:
        constants.fn.__globals__["FIELDS"], constants.hash = fields, None
    assert constants.cache_key == key


def test_constants_of_a_kernel_are_compared_by_their_values():
    """Triton names the instances of a device function by the text of their constants."""
    from gdn.backends.triton.serving.structs import Constants

    few, many = Constants({"K": 64, "AXIS": "k"}), Constants({"K": 128, "AXIS": "k"})
    assert few != many and few == Constants({"K": 64, "AXIS": "k"}) and hash(few) == hash("K64_AXISk")
    assert (few.K.value, few.AXIS.value) == (64, "k")


def test_a_binary_may_be_loaded_in_a_capture(monkeypatch):
    """The first launch of a thread that captures a graph is in the relaxed mode; the mode is restored."""
    modes, current = [], [0]

    def exchange(pointer):
        modes.append(pointer._obj.value)
        current[0], pointer._obj.value = pointer._obj.value, current[0]

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: driver)
    with device.loads_in_captures():
        assert modes == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="launch"), device.loads_in_captures():
        assert current == [2]
        raise RuntimeError("launch")
    assert modes == [2, 0] and current == [0]


CAPTURE = """
import torch, gdn
x = {n: torch.randn(3, 1, 2, 64, device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v")}
x |= {n: torch.rand(3, 1, 2, device="cuda") for n in ("g", "beta")}
x["g"] = -x["g"]
first = torch.randn(3, 2, 64, 64, device="cuda")
states = [first.clone() for _ in range(2)]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = gdn.decode(**x, state=states[0])
states[0].copy_(first)
graph.replay()
o = gdn.decode(**x, state=states[1])
assert torch.equal(captured, o) and torch.equal(*states)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_first_call_of_a_process_may_be_captured():
    done = subprocess.run([sys.executable, "-c", CAPTURE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_fault_in_work_that_no_call_needs_is_logged(monkeypatch, failures):
    """A fault of gdn where launches are compiled together is logged with its traceback, in any thread."""

    def raise_fault(*given):
        raise AttributeError("a fault of gdn")

    monkeypatch.setattr(launches, "compile_all", raise_fault)
    fault = "AttributeError: a fault of gdn"
    with failures.expects(f"in parallel failed.*{fault}", f"in the background failed.*{fault}"):
        launches.compile_now(torch.device("cpu"), [])
        jobs = background.Background(raise_fault)
        monkeypatch.setattr(background, "QUIET", 0.0)
        jobs.add({"a job": "a job"})
        jobs._thread.join()
    for number in (0, 2):
        with pytest.raises(AssertionError, match="a fault of gdn"), failures.expects(*[fault] * number):
            launches.compile_now(torch.device("cpu"), [])


def test_a_failure_in_the_background_names_the_test_that_added_the_work(monkeypatch):
    """A later test runs by then."""

    def run(job):
        assert go.wait(60)
        raise AttributeError(job)

    go, log = threading.Event(), Failures()
    own = background.Background(run)
    monkeypatch.setattr(launches, "BACKGROUND", own)
    monkeypatch.setattr(background, "QUIET", 0.0)
    monkeypatch.setattr(logging.getLogger("gdn.failures"), "handlers", [log])
    own.add({1: "first", 2: "second"})
    thread = own._thread
    assert log.end("test_a") == []
    own.add({2: "second", 3: "third"})
    assert log.end("test_b") == []
    own.add({4: "fourth"})
    go.set()
    thread.join()
    texts = log.end("test_c")
    names = [re.match(r"work that (\w+) has added: a compilation", x) for x in texts]
    assert [x and x[1] for x in names] == ["test_a", "test_a", "test_b", None] and log.tests == {}
    assert [x.splitlines()[-1] for x in texts] == [
        f"AttributeError: {number}" for number in ("first", "second", "third", "fourth")
    ]
    assert log.texts == []
