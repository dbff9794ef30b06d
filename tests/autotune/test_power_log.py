"""A site's CSV of watts at the wall: whatever order and names of columns, and one clear message for a line that is wrong."""

import numpy as np
import pytest

from autotune.errors import SpecError
from autotune.power_log import read_power_log


def log(folder, text, name="pdu.csv"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "time,node,watts\n2026-03-01T12:00:00Z,n1,412\n2026-03-01T12:00:01Z,n1,414.5\n",
        "watts,outlet,Node,TIME\n414.5,7,N1,2026-03-01T13:00:01+01:00\n412,7,n1,2026-03-01T12:00:00.000+00:00\n",
        "\ufefftimestamp;hostname;power_w\n1772366400;n1;412\n\n1772366401.0;n1;414.5\n",
        "time_utc\thost\twatts\n1772366400\tn1\t 412 \n 1772366401\tn1\t414.5\n",
        "time,node,domain,watts\n1772366400,n1,,412\n1772366401,n1,,414.5\n1772366401,,Rack-7,9000\n",
    ],
)
def test_columns_in_any_order_and_times_of_either_kind(text, tmp_path):
    found = read_power_log(log(tmp_path, text))
    times, watts = found.of_node(["n1"])
    assert list(times) == [1772366400.0, 1772366401.0]
    assert list(watts) == [412.0, 414.5]
    assert set(found.domains) == ({"rack-7"} if "Rack" in text else set())


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        ("", "--pdu: is empty", "columns: time"),
        ("a,b,c\n1,2,3", "pdu.csv line 1: has no column for the time (got 'a,b,c')", "timestamp"),
        ("time,watts\n1,2", "line 1: has no column for the node or domain", "domain"),
        ("time,node,power\n1,n1,2", "line 1: has no column for the watts", "power_w"),
        ("time,timestamp,node,watts\n1,1,n1,2", "line 1: is a second column for the time (got 'timestamp')", "columns"),
        ("time,node,watts\n1,n1,412\n2,n1,abc", "pdu.csv line 3, watts: is not a number of watts (got 'abc')", "412.5"),
        ("time,node,watts\n1,n1,", "line 2, watts: is not a number of watts (got '')", "leave a line out"),
        ("time,node,watts\n1,n1,N/A", "line 2, watts: is not a number of watts (got 'N/A')", "leave a line out"),
        ("time,node,watts\n1,n1,-3", "line 2, watts", "412.5"),
        ("time,node,watts\n1,n1,nan", "line 2, watts", "412.5"),
        ("time,node,watts\n1,n1,inf", "line 2, watts", "412.5"),
        ("time,node,watts\n1,n1", "line 2, watts: is not a number of watts (got '')", "412.5"),
        ("time,node,watts\nnoon,n1,3", "line 2, time: is not a time (got 'noon')", "2026-03-01T12:00:00Z"),
        ("time,node,watts\n2026-03-01T12:00:00,n1,3", "line 2, time: has no time zone", "zone"),
        ("time,node,watts\n1772366400000,n1,3", "line 2, time: is no Unix time in seconds", "Unix seconds"),
        ("time,node,watts\nnan,n1,3", "line 2, time", "Unix seconds"),
        ("time,node,watts\n1,,3", "line 2, node: is missing", "node"),
        ("time,node,domain,watts\n1,n1,rack,3", "line 2, domain: is given as well as a node", "a node or a domain"),
        ("time,node,watts\n1,n1,3\n2,n1,3\n1,N1,4", "line 4, node: has another value for the same time (got 'n1')", "add up"),
        ('time,node,watts\n1,"n1,3', "line 2", ""),
    ],
)
def test_a_wrong_line_is_one_message_with_line_field_value_and_hint(lines, message, hint, tmp_path):
    with pytest.raises(SpecError) as found:
        read_power_log(log(tmp_path, lines))
    assert message in str(found.value)
    assert hint in found.value.hint


@pytest.mark.parametrize("content", [b"\xff\xfe\x00t", None])
def test_a_file_that_cannot_be_read(content, tmp_path):
    path = tmp_path / "pdu.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match="--pdu: (is not a text file|cannot be read: no such file)"):
        read_power_log(path)


def test_nothing_that_runs_a_trial_draws_nothing(tmp_path):
    found = read_power_log(log(tmp_path, "time,node,watts\n1,n1,0\n2,n1,400\n"))
    assert list(found.of_node(["n1"])[1]) == [400.0]


@pytest.mark.parametrize(
    ("in_log", "names", "is_found"),
    [
        ("n1", ["n1.cluster.local", "10.0.0.1"], True),
        ("N1.cluster.local", ["n1", "10.0.0.1"], True),
        ("10.0.0.1", ["n1", "10.0.0.1"], True),
        ("n1.cluster.local", ["n1.other.net", "10.0.0.1"], False),
        ("n11", ["n1", "10.0.0.1"], False),
        ("10", ["n1", "10.0.0.1"], False),
    ],
)
def test_a_node_is_found_by_name_or_address_with_or_without_its_domain(in_log, names, is_found, tmp_path):
    found = read_power_log(log(tmp_path, f"time,node,watts\n1,{in_log},400\n"))
    assert bool(len(found.of_node(names)[0])) is is_found


def test_the_exact_name_wins(tmp_path):
    found = read_power_log(log(tmp_path, "time,node,watts\n1,n1.a,400\n1,n1,500\n"))
    assert np.array_equal(found.of_node(["n1", ""])[1], [500.0])
    assert np.array_equal(found.of_node(["n1.a"])[1], [400.0])
