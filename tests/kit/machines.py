"""Stateful tests: sequences of calls that hypothesis makes up, for some seconds or for hours.

Without a word they are the same each time. `DSEC_FUZZ_S=3600` goes on with other seeds, and `DSEC_FUZZ_SEED` says with
which it begins: a failure names the one it was found with.
"""

from __future__ import annotations

import itertools
import os
import time

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.kit.mutations import SECONDS_ENV, SEED_ENV


def run_machine(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Runs examples of a machine, and round after round of them while there is time."""
    end = time.monotonic() + float(os.environ.get(SECONDS_ENV) or 0)
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,  # what a step takes is the machine's business
        # Not made smaller: a death does not come at the same moment again, and each try takes seconds.
        phases=(Phase.generate,),
        database=None,  # what failed is told with its seed
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    for seed in itertools.count(int(os.environ.get(SEED_ENV) or 0)):
        print(f"{machine.__name__}: seed {seed}, {examples} examples of {steps} steps", flush=True)
        of_this_round = type(machine.__name__, (machine,), {})
        run_state_machine_as_test(hypothesis.seed(seed)(of_this_round), settings=chosen)
        if time.monotonic() >= end:
            return
