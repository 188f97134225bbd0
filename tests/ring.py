"""Which tests `pytest -q tests` runs: those that five minutes on two cores have room for.

Five minutes on two free cores are about 370 seconds of CPU: tests run on one core, the scenarios
that they wait for on the other. seconds.json says how many each dear test takes, with the processes
that it starts. MUST comes first, then the cheapest ones, until BUDGET is full; the rest is marked
`slow`. A test that is not in seconds.json is cheap or new, and runs.

    python -m pytest -q tests -m "" --seconds     runs all, and writes seconds.json (at night)
    python -m pytest -q FILE -m "" --seconds      the same for the tests of a file
    python tests/ring.py                          what is chosen, and what it takes
"""

import functools
import json
import os
import pathlib
import time

import pytest

FILE = pathlib.Path(__file__).with_name("seconds.json")
BUDGET = 300  # seconds of CPU; some 70 more pass outside of tests
LAUNCH = 8  # seconds that the scenarios of a file take before the first of them begins
MUST_BUDGET = 200  # what MUST may take of them
DEAR = 0.5  # seconds of CPU from which on a test stands in seconds.json
FORK = "test_a_fork_makes_the_numbers_of_its_flag["
RANKS = "test_on_several_ranks[ppo_scenarios-"
MUST = {  # what must be shown each time -> the file, and how the names of its tests begin
    "FSDP, Ulysses": ("critic/test_layouts", "test_every_layout_makes_the_same_gradient[2"),
    "tp, pp, cp": (
        "critic/test_megatron_layouts",
        "test_every_layout_makes_the_same_values_gradient_and_step[2-qwen2]",
    ),
    "PPO on two ranks": ("test_scenarios", f"{RANKS}golden fsdp 2]"),
    "PPO with Megatron": ("test_scenarios", f"{RANKS}golden megatron tp 2]"),
    "one step on one rank, on two": ("test_scenarios", f"{RANKS}one step on"),
    "a run goes on": ("test_scenarios", f"{RANKS}fsdp 2 goes on, offloaded]"),
    "SIGTERM": ("loop/test_ppo_loop", "test_sigterm_interrupts_a_phase[update of the critic"),
    "Ctrl-C": ("runs/test_stops", "test_ctrl_c_in_the_loop_saves_the_state[critic_fsdp-1]"),
    "kill -9": (
        "runs/test_stops",
        "test_a_crash_loses_no_more_than_the_steps_since_the_last_evaluation[critic_fsdp-2]",
    ),
    "a rank fails": (
        "runs/test_ranks",
        "test_when_one_rank_fails_all_end_and_a_message_is_shown[critic_fsdp",
    ),
    "README's first command": ("runs/test_readme", "test_command_runs[python critic_fsdp.py]"),
    "fork sp3o": ("forks/test_forks", f"{FORK}sp3o]"),
    "fork hl_gauss": ("forks/test_forks", f"{FORK}hl_gauss]"),
    "fork evpo": ("forks/test_forks", f"{FORK}evpo]"),
    "fork first_token_credit": ("forks/test_forks", f"{FORK}first token]"),
    "fork sao": ("forks/test_forks", f"{FORK}sao]"),
    "fork bpco": ("forks/test_forks", f"{FORK}bpco]"),
}
SPENT = []  # of the test that runs: (name of a scenario or None, seconds) of other processes


def spent(seconds, scenario=None):
    """Notes CPU seconds of processes that the present test has waited for. Several tests may wait
    for a scenario, which counts once."""
    SPENT.append((scenario, seconds))


def own_seconds():
    """CPU seconds of this process and of those that it has started and waited for."""
    return sum(os.times()[:4])


def machine_seconds():
    """CPU seconds of the whole machine since its start, without idle ones; 0 where this is not
    told."""
    stat = pathlib.Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


# ---- The choice ----------------------------------------------------------------------------------


@functools.cache
def known():
    """What seconds.json says: {"cheap": {file: seconds of its tests that are not in it}, "tests":
    {id: [seconds, names of scenarios that it waits for]}, "scenarios": {name: seconds}}."""
    if not FILE.exists():
        return {"cheap": {}, "tests": {}, "scenarios": {}}
    return json.loads(FILE.read_text())


def ids_of_must():
    """What must be shown -> how the ids of its tests begin."""
    return {what: f"tests/{file}.py::{name}" for what, (file, name) in MUST.items()}


def choose(found, must=None, budget=BUDGET):
    """The tests of seconds.json that run by default -> (their ids, CPU seconds of all that runs, of
    these for what must run)."""
    must = tuple(ids_of_must().values() if must is None else must)
    chosen, paid, total = set(), set(), sum(found["cheap"].values())

    files_of = lambda scenarios: {name.partition("-")[0] for name in scenarios}

    def price(test):
        seconds, scenarios = found["tests"][test]
        launches = len(files_of(scenarios) - files_of(paid))
        new = {*scenarios} - paid
        return seconds + LAUNCH * launches + sum(found["scenarios"][name] for name in new)

    def take(test):
        seconds = price(test)
        chosen.add(test)
        paid.update(found["tests"][test][1])
        return seconds

    of_must = sum(take(test) for test in found["tests"] if test.startswith(must))
    total += of_must

    # what shares a scenario with a test that was taken has become cheaper
    while rest := found["tests"].keys() - chosen:
        cheapest = min(rest, key=lambda test: (price(test), test))
        if total + price(cheapest) > budget:
            break
        total += take(cheapest)
    return chosen, total, of_must


# ---- What pytest calls ---------------------------------------------------------------------------


class Ring:
    """A plug-in: chooses, measures, and says how long it takes."""

    def __init__(self, config):
        self.config = config
        self.found = known()
        self.chosen, *_ = choose(self.found)
        self.measured = {}  # id -> (seconds of this process, [(scenario, seconds), ...])
        self.unknown = set()  # ids of tests that were skipped, or failed
        self.collected = set()  # ids of all tests of the files that were read
        self.ahead = {}  # id -> seconds of each test that has still to run
        self.all = 0.0  # their sum at the start
        self.machine = machine_seconds()
        self.said = self.began = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        """Marks what is not chosen, before -m is looked at."""
        self.collected = {item.nodeid for item in items}
        for item in items:
            if item.nodeid in self.found["tests"] and item.nodeid not in self.chosen:
                item.add_marker(pytest.mark.slow)

    def pytest_collection_finish(self, session):
        paid = set()
        for item in session.items:
            seconds, scenarios = self.found["tests"].get(item.nodeid, (0.1, ()))
            new = {*scenarios} - paid
            self.ahead[item.nodeid] = seconds + sum(self.found["scenarios"][x] for x in new)
            paid |= new
        self.all = sum(self.ahead.values())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        SPENT.clear()
        before, began = own_seconds(), time.monotonic()
        result = yield
        seconds = own_seconds() - before

        # who sleeps holds up one of two cores, but not who waits for a scenario
        if not any(scenario for scenario, _ in SPENT):
            slept = (time.monotonic() - began) / 2
            seconds = max(seconds, slept - sum(more for _, more in SPENT))
        self.measured[item.nodeid] = (seconds, SPENT[:])
        return result

    def pytest_runtest_logreport(self, report):
        """What was skipped, or failed, says nothing of its seconds."""
        if report.outcome != "passed":
            self.unknown.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        """Says each half minute what is left, by the seconds of the tests that have run."""
        self.ahead.pop(nodeid, None)
        now, left = time.monotonic(), sum(self.ahead.values())
        if now - self.said > 30 and 0 < left < self.all:
            minutes = (now - self.began) / 60 * left / (self.all - left)
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write(f"\n{1 - left / self.all:.0%} done, {minutes:.1f} minutes left\n")
            self.said = now

    def pytest_terminal_summary(self, terminalreporter):
        minutes = (time.monotonic() - self.began) / 60
        seconds = machine_seconds() - self.machine
        terminalreporter.write_line(
            f"{minutes:.1f} minutes; {seconds:.0f} seconds of CPU on the whole machine"
        )
        if self.config.getoption("--seconds"):
            self.save()

    def save(self):
        """Writes what was measured into seconds.json. What else is there stays, but for tests that
        are gone."""
        file_of = lambda test: test.partition("::")[0]
        files = {file_of(test) for test in self.collected}
        there = lambda file: (FILE.parents[1] / file).exists()
        tests, scenarios = {}, dict(self.found["scenarios"])
        for test, x in self.found["tests"].items():
            file = file_of(test)
            if test in self.collected or (file not in files and there(file)):
                tests[test] = x
        cheap = {file: x for file, x in self.found["cheap"].items() if there(file)}
        cheap |= {file_of(test): 0.0 for test in self.measured}

        for test in self.measured.keys() - self.unknown:
            seconds, more = self.measured[test]
            scenarios |= {name: round(x, 1) for name, x in more if name}
            names = sorted({name for name, _ in more if name})
            seconds += sum(x for name, x in more if not name)
            if names or seconds >= DEAR:
                tests[test] = [round(seconds, 1), names]
            else:
                tests.pop(test, None)
                cheap[file_of(test)] += seconds

        asked = {name for _, names in tests.values() for name in names}
        found = {
            "cheap": {file: round(x, 1) for file, x in sorted(cheap.items())},
            "tests": dict(sorted(tests.items())),
            "scenarios": {name: x for name, x in sorted(scenarios.items()) if name in asked},
        }
        FILE.write_text(json.dumps(found).replace(', "', ',\n"') + "\n")


def main():
    """Prints what is chosen."""
    found = known()
    chosen, total, of_must = choose(found)
    print(
        f"{len(chosen)} of {len(found['tests'])} dear tests and all cheap ones: {total:.0f} seconds"
        f" of {BUDGET}; {of_must:.0f} of {MUST_BUDGET} for what must run"
    )
    for what, name in ids_of_must().items():
        tests = [x for test, x in found["tests"].items() if test.startswith(name)]
        scenarios = {name for _, names in tests for name in names}
        seconds = sum(x for x, _ in tests) + sum(found["scenarios"][name] for name in scenarios)
        print(f"{what:32}{seconds:6.1f} s")


if __name__ == "__main__":
    main()
