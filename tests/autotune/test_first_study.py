"""The first study is one that the specs accept, keeps its comments, and never replaces a person's file unasked."""

from typing import get_args

import pytest
import yaml

from autotune.detect import CPU_POOL
from autotune.errors import SpecError
from autotune.first_study import write_study
from search_spaces.config import TrialConfig, knobs
from search_spaces.hardware import PoolSpec
from search_spaces.model import ModelSpec

POOLS = {
    "cpu": [CPU_POOL],
    "gpu": [PoolSpec(name="local-h100", gpu="H100", gpus_per_node=8)],
    "two types": [PoolSpec(name="a", gpu="A100", gpus_per_node=4), PoolSpec(name="b", gpu="MI300X", gpus_per_node=8)],
    "six": [PoolSpec(name="six", gpu="A40", gpus_per_node=6)],
}


@pytest.fixture(params=POOLS)
def pools(request):
    return POOLS[request.param]


def test_every_part_is_accepted_by_its_spec(tmp_path, pools):
    study = yaml.safe_load(write_study(tmp_path / "first.yaml", pools).read_text())
    assert set(study) == {"name", "model", "pools", "global_batch_size", "seq_length", "baseline", "search", "budget"}
    ModelSpec(**study["model"])
    assert [PoolSpec(**pool) for pool in study["pools"]] == pools
    assert study["budget"].keys() == {"trials", "wall_time_s"}
    baseline = TrialConfig(**study["baseline"])
    for pool in pools:
        dp = baseline.data_parallel_size(pool.world_size)
        assert dp and study["global_batch_size"] % (dp * baseline.micro_batch_size) == 0
    assert study["search"].keys() <= knobs().keys()
    for knob, choices in study["search"].items():
        assert [getattr(TrialConfig(**{knob: value}), knob) for value in choices] == choices


def test_choices_are_distinct_and_hold_what_the_baseline_runs(tmp_path, pools):
    study = yaml.safe_load(write_study(tmp_path / "s.yaml", pools).read_text())
    for knob, choices in study["search"].items():
        assert len(choices) == len(set(choices)) > 1
        assert getattr(TrialConfig(**study["baseline"]), knob) in choices


def test_shapes_divide_by_every_common_parallel_size(tmp_path, pools):
    model = yaml.safe_load(write_study(tmp_path / "s.yaml", pools).read_text())["model"]
    largest = 4 if pools == [CPU_POOL] else 8
    assert {name: size % largest for name, size in model.items()} == dict.fromkeys(model, 0)


def test_overlap_is_searched_where_there_is_something_to_overlap(tmp_path):
    searched = {
        key: yaml.safe_load(write_study(tmp_path / f"{key}.yaml", POOLS[key]).read_text())["search"] for key in ("cpu", "gpu")
    }
    assert searched["gpu"].keys() - searched["cpu"].keys() == {"overlap_grad_reduce", "overlap_param_gather"}


def test_parallel_sizes_divide_the_ranks(tmp_path):
    study = yaml.safe_load(write_study(tmp_path / "s.yaml", POOLS["six"]).read_text())
    assert study["search"]["tensor_model_parallel_size"] == [1, 2, 3, 6]


def test_cpu_study_offers_only_what_a_cpu_runs(tmp_path):
    study = yaml.safe_load(write_study(tmp_path / "s.yaml", [CPU_POOL]).read_text())
    assert study["baseline"]["precision"] in get_args(TrialConfig.model_fields["precision"].annotation)
    assert all("cpu" in knobs()[knob].devices for knob in study["search"])
    assert study["budget"]["trials"] >= 12


@pytest.mark.parametrize(
    ("file", "name"), [("my study.yaml", "my-study"), ("yes.yaml", "yes"), ("12.yaml", "12"), ("ä.yaml", "study")]
)
def test_name_comes_from_the_file_and_stays_a_word(tmp_path, file, name):
    assert yaml.safe_load(write_study(tmp_path / file, [CPU_POOL]).read_text())["name"] == name


def test_every_section_has_a_comment(tmp_path):
    lines = write_study(tmp_path / "s.yaml", [CPU_POOL]).read_text().splitlines()
    sections = [index for index, line in enumerate(lines) if line.endswith(":") and not line.startswith(" ")]
    assert len(sections) == 5
    assert all(lines[index - 1].startswith("#") for index in sections)


def test_file_of_a_person_is_kept_without_force(tmp_path):
    path = tmp_path / "deep" / "study.yaml"
    write_study(path, [CPU_POOL])
    path.write_text("mine")
    with pytest.raises(SpecError, match="exists already") as caught:
        write_study(path, [CPU_POOL])
    assert "--force" in caught.value.hint
    assert path.read_text() == "mine"
    write_study(path, [CPU_POOL], force=True)
    assert path.read_text() != "mine"


def test_folder_is_refused(tmp_path):
    with pytest.raises(SpecError, match="is a folder"):
        write_study(tmp_path, [CPU_POOL], force=True)
