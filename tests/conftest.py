"""What all tests share: markers, the two kinds of loop, seeds, and the factor by which property tests are run longer.

Markers are set here and not in the test files, so that nobody has to remember them: ``realtime`` for tests that let
seconds pass with real processes and sockets (by folder; a file or a test elsewhere asks for it itself, as those of
``loadtest`` do that run servers), ``pipeline`` for those on Spark (by folder; a file elsewhere asks for it), ``fuzz``
for every property test.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import random
import re
import signal
from pathlib import Path

import hypothesis
import pytest
import structlog
import uvloop
from chance_kit import SEED
from loopback_kit import LOOPBACK, why_not
from process_kit import adopt_orphans, end_children, use_default_signals
from run_all import PIPELINE, REALTIME

HERE = Path(__file__).parent

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
COROUTINE_S = 60.0
"""A test that is a coroutine and has not ended after so long hangs, also on a busy machine."""
HOUSE_S = 1800.0
"""A test of the house goes through all there is of source: on a busy machine that takes long, and is no hang."""
IN_TEST = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def six():
    """The loopback address of IPv6."""
    missing = why_not("::1")
    if missing:
        pytest.skip(missing)
    return "::1"


def pytest_addoption(parser):
    parser.addoption(
        "--examples-factor",
        type=int,
        default=1,
        metavar="N",
        help="run property tests with N times their examples (make fuzz)",
    )
    parser.addoption(
        "--seed",
        metavar="N",
        help="begin random tests at seed N, or at a `new` one (make fuzz); without it they are the same each time",
    )


@pytest.hookimpl(tryfirst=True)  # before hypothesis looks for its seed
def pytest_configure(config):
    seed = config.option.seed
    if seed is not None:
        drawn = os.environ.get(SEED) or random.SystemRandom().randrange(1 << 31)  # workers find what was drawn for all
        seed = config.option.seed = str(drawn if seed == "new" else int(seed))
        config.option.hypothesis_seed = os.environ[SEED] = seed
        hypothesis.settings.load_profile("wandering")
    use_default_signals()
    adopt_orphans()
    # Java that lives for seconds: its second compiler costs more than it saves (38 % of the processor time of a file of
    # tests). Programs that tests start inherit it. With it alone, the code cache is 48 MB, which Spark fills.
    os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")
    # A distribution may have an FFmpeg too old for some tests (HEVC in FLV); that of the dev extra is not.
    with contextlib.suppress(ImportError, RuntimeError):
        import imageio_ffmpeg

        os.environ.setdefault("FLOWCTL_FFMPEG", imageio_ffmpeg.get_ffmpeg_exe())
    config.addinivalue_line("markers", "realtime: lets seconds pass with real processes; not beside tests that compute")
    config.addinivalue_line("markers", "pipeline: on Spark; with `realtime` too, in programs with a Java of their own")
    config.addinivalue_line("markers", "fuzz: a property test; `make fuzz` runs these longer")


# Machines that are busy stop a test for longer than any deadline that would say something about the code.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.register_profile("wandering", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("fixed")


def pytest_report_header(config):
    return None if config.option.seed is None else f"seed {config.option.seed}: --seed {config.option.seed} repeats it"


def pytest_terminal_summary(terminalreporter, config):
    """Say the seed once more beside what failed: the head of a long run is far away."""
    if config.option.seed is not None and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"random tests began at another seed than usual: --seed {config.option.seed}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Leave logging as it was: commands set it up for the whole process, and later tests look for lines of the log."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return (yield)
    finally:
        if root.handlers != handlers or root.level != level:
            root.handlers[:] = handlers
            root.setLevel(level)
            structlog.reset_defaults()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    item.stash[IN_TEST] = True
    try:
        return (yield)
    finally:
        item.stash[IN_TEST] = False


pytest_runtest_setup = pytest_runtest_call


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item):
    """Let a test's time be up within the test: raised while pytest reports, it ends the whole run and not the test."""
    result = yield
    raise_failed = signal.getsignal(signal.SIGALRM)

    def time_is_up(number, frame):
        if item.stash.get(IN_TEST, False):
            raise_failed(number, frame)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.1)

    if callable(raise_failed):
        signal.signal(signal.SIGALRM, time_is_up)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function on a loop of its fixture `loop_factory`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with asyncio.Runner(loop_factory=pyfuncitem.funcargs["loop_factory"]) as runner:
        runner.run(asyncio.wait_for(pyfuncitem.obj(**arguments), COROUTINE_S))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Take addresses out of the names of parameters: workers side by side must call a test by the same name."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if mark.kwargs.get("ids") is repr:
            mark.kwargs["ids"] = lambda value: ADDRESS.sub("", repr(value))


def pytest_collection_modifyitems(config, items):
    factor = config.getoption("--examples-factor")
    missing = why_not(LOOPBACK)
    for item in items:
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
        if any(item.path.is_relative_to(HERE / name) for name in REALTIME):
            item.add_marker("realtime")
        if item.path.is_relative_to(HERE / PIPELINE):
            item.add_marker("pipeline")
        if item.path.is_relative_to(HERE / "house"):
            item.add_marker(pytest.mark.timeout(HOUSE_S))
        by_hypothesis = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if by_hypothesis or "seed" in getattr(getattr(item, "callspec", None), "params", {}):
            item.add_marker("fuzz")
            if by_hypothesis and factor > 1:
                multiply_examples(item, factor)


def pytest_collection_finish(session):
    """Take the tests themselves, millions of objects, out of what garbage collections look through from now on."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End what the real-time tests of a file have left running, and fail for it: it would disturb all that follow."""
    item.stash[IN_TEST] = True
    try:
        result = yield
    finally:
        item.stash[IN_TEST] = False
    last_of_file = nextitem is None or nextitem.path != item.path
    if last_of_file and item.get_closest_marker("realtime"):
        left = end_children()
        assert left == [], "processes outlived their tests"
    return result


def multiply_examples(item, factor: int) -> None:
    """Give a property test `factor` times its examples.

    A profile cannot do it, because the tests state their number of examples and that wins over a profile.
    """
    machine_case = hasattr(item.cls, "settings")  # the TestCase of a state machine keeps them on the class
    old = item.cls.settings if machine_case else item.obj._hypothesis_internal_use_settings
    new = hypothesis.settings(old, max_examples=old.max_examples * factor)
    if machine_case:
        item.cls.settings = new
    else:
        getattr(item.obj, "__func__", item.obj)._hypothesis_internal_use_settings = new


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def loop_factory(request):
    """Make a loop: each test that asks for this runs once on uvloop and once on asyncio's own."""
    return request.param
