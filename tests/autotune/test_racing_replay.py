"""Racing replayed on made-up traces: a trial shows what was recorded, cut where a real one ends, and the promise is judged."""

import json
import random
import sys

import pytest

from autotune.candidates import candidate_table
from autotune.errors import SpecError
from autotune.proposal import Proposal
from autotune.records import Phase
from autotune.run_spread import RunSpread
from autotune.spec import load_study
from benchmarks import racing_replay
from benchmarks.exhaustive_cpu import STUDY
from search_spaces.config import TrialConfig

SPEC = load_study(STUDY)
STEPS = 14


def made_up(noise=0.01, apart=0.2, runs=3, seed=1):
    """Every legal configuration; each is slower than the one before it by `apart`, the first two steps are slow."""
    table = candidate_table(SPEC, SPEC.pools[0])
    draw = random.Random(seed)

    def run(base):
        return [base * (9.0, 3.0)[step] if step < 2 else base * draw.lognormvariate(0.0, noise) for step in range(STEPS)]

    places = draw.sample(range(len(table)), len(table))
    return {table.config(row): [run(0.1 * (1 + apart * place)) for _ in range(runs)] for row, place in enumerate(places)}


@pytest.fixture(scope="module")
def traces():
    return made_up()


@pytest.fixture
def file(tmp_path, traces):
    rows = [{"config": config.changed(), "name": "", "step_s": runs} for config, runs in traces.items()]
    path = tmp_path / "traces.json"
    path.write_text(json.dumps(rows))
    return path


def test_a_file_is_read_as_it_was_written(file, traces):
    assert racing_replay.read(file) == traces
    assert len(traces) >= racing_replay.FEWEST_CONFIGURATIONS


def test_racing_ends_the_slow_and_finds_the_best(traces):
    found = racing_replay.entry(SPEC, traces, len(traces), 0.0, seed=3)
    assert found["found"] and found["found_without"]
    assert found["raced_out"] > len(traces) / 2
    assert found["seconds"] < found["exploring_seconds"] + found["exploring_seconds_without"]
    assert found["exploring_seconds"] < 0.8 * found["exploring_seconds_without"]


def test_without_racing_the_seconds_are_those_of_the_trials_own_ends(traces):
    """With an interval of 0 nothing ends early, so that every recorded step is run."""
    spec = SPEC.model_copy(update={"measurement": SPEC.measurement.model_copy(update={"interval": 0.0})})
    whole = racing_replay.replay(racing_replay.study_of(spec, traces, 0, len(traces), racing=False), traces)
    assert whole.trials[Phase.EXPLORE] == len(traces) - 1
    assert whole.raced_out == 0 and whole.counted_s == 0.0
    assert sum(whole.trials.values()) * STEPS > len(traces) * STEPS, "the best and the baseline are confirmed"
    explored = whole.seconds[Phase.EXPLORE] + whole.seconds[Phase.BASELINE]
    assert explored == pytest.approx(sum(sum(runs[0]) for runs in traces.values()), rel=0.02)


def test_a_configuration_is_confirmed_with_its_other_runs(traces):
    study = racing_replay.study_of(SPEC, traces, 0, 5, racing=True)
    assert (study.confirm.repeats, study.confirm_steps, study.measurement.steps) == (2, STEPS, STEPS)
    recorded = racing_replay.Recorded(study, traces)
    config, runs = next(iter(traces.items()))
    shown = [recorded.run(Proposal(None, config, Phase.CONFIRM, 0.0), RunSpread()) for _ in runs]
    assert sorted([step.step_s for step in result.steps] for result in shown) == sorted(runs)


def test_a_trial_ends_where_a_real_one_would(traces):
    recorded = racing_replay.Recorded(racing_replay.study_of(SPEC, traces, 0, 5, racing=True), traces)
    config = next(iter(traces))
    beaten = recorded.run(Proposal(None, config, Phase.EXPLORE, 0.0, beaten_s=1e-3), RunSpread())
    assert beaten.raced_out and len(beaten.steps) == 6, "two of warm-up and four that tell"
    able = recorded.run(Proposal(None, config, Phase.EXPLORE, 0.0, beaten_s=1e3), RunSpread())
    assert not able.raced_out and len(able.steps) > 6


def test_within_the_best_are_those_inside_the_interval_of_its_runs():
    warm = [9.0, 9.0]
    runs = {
        TrialConfig(micro_batch_size=1): [warm + [1.0] * 8, warm + [1.0] * 8, warm + [1.1] * 8],
        TrialConfig(micro_batch_size=2): [warm + [1.09] * 8] * 3,
        TrialConfig(micro_batch_size=4): [warm + [1.0] * 8, warm + [1.2] * 8, warm + [1.2] * 8],
    }
    assert [config.micro_batch_size for config in racing_replay.within_best(runs, 2)] == [1, 2]


def test_runs_of_nearly_the_same_speed_are_not_ended(traces):
    alike = made_up(noise=0.05, apart=0.0)
    found = racing_replay.entry(SPEC, alike, len(alike), 0.0, seed=0)
    assert found["raced_out"] <= len(alike) / 10


def test_start_up_is_not_saved(traces):
    without, with_startup = (racing_replay.summary([racing_replay.entry(SPEC, traces, 10, startup_s, 0)]) for startup_s in (0, 1))
    assert without["saved_share_with_startup"] == without["saved_share"] == with_startup["saved_share"]
    assert 0 < with_startup["saved_share_with_startup"] < with_startup["saved_share"]


@pytest.mark.parametrize(
    ("figures", "configurations", "shown"),
    [
        ({"saved_share": 0.30, "found": 19, "seeds": 20}, 40, True),
        ({"saved_share": 0.29, "found": 20, "seeds": 20}, 40, False),
        ({"saved_share": 0.50, "found": 18, "seeds": 20}, 40, False),
        ({"saved_share": 0.50, "found": 20, "seeds": 20}, 39, False),
    ],
)
def test_the_promise(figures, configurations, shown):
    assert racing_replay.is_shown(figures, configurations) is shown


def test_the_program_prints_writes_and_judges(file, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["racing_replay.py", str(file), "--seeds", "1", "--workers", "1", "--output", str(output)])
    code = racing_replay.main()
    told = json.loads(output.read_text())
    assert code == int(not racing_replay.is_shown(told, told["configurations"]))
    assert told["trials"] == told["configurations"] and len(told["by_seed"]) == told["seeds"] == 1
    assert f"{told['saved_share']:.1%}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "cannot be read"),
        ([{"config": {"no_such_knob": 1}, "step_s": [[1.0]] * 3}], "cannot be read"),
        ([{"config": {}, "step_s": [[1.0]] * 2}], "has 2 runs"),
        ([{"config": {}, "step_s": [[1.0], [1.0], [1.0, 2.0]]}], "different numbers"),
    ],
)
def test_other_files_are_refused(rows, message, tmp_path):
    path = tmp_path / "traces.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(SpecError, match=message):
        racing_replay.read(path)
