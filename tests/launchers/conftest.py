"""A process tree per test, and what a test needs to look at it from outside."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from launchers.base import Rendezvous
from launchers.process import LaunchRequest, Supervised
from search_spaces.hardware import RankEnvironment
from tests.launchers.megatron_harness import warm_trials

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def open_tree():
    """Start process trees that are closed after the test."""
    trees = []

    def start(environment=None, **options):
        tree = Supervised(environment or RankEnvironment(python=sys.executable), **options)
        trees.append(tree)
        tree.start()
        return tree

    yield start
    for tree in trees:
        tree.close()


@pytest.fixture(scope="package")
def trials():
    """A warm process for Megatron's trials: importing torch and megatron takes seconds."""
    with warm_trials() as warm:
        yield warm


@pytest.fixture
def tree(open_tree):
    """A running process tree without anything to preload."""
    return open_tree()


@pytest.fixture
def request_of(tmp_path):
    """Make a launch request for one of the programs beside these tests."""
    numbers = itertools.count()

    def make(program, job=None, *, num_ranks=2, env=None, world_size=None, ranks=None):
        trial = f"trial{next(numbers)}"
        path = program if program.endswith(".py") or "." in program else str(PROGRAMS / f"{program}.py")
        rendezvous = Rendezvous("127.0.0.1", 29500, world_size or num_ranks, 0, num_ranks)
        ranks = ranks if ranks is not None else tuple(range(num_ranks))
        return LaunchRequest(trial, path, job or {}, rendezvous, ranks, tmp_path / trial, env or {})

    return make
