"""What a wrong spec is refused with, and what `laneway spec --explain` says."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from serving.spec import Spec, SpecError, explain, load, parse
from tests.unit.spec_edits import ROOT, problems_of, shipped, with_value

CANARY = "canary-0f9a7"


@pytest.mark.parametrize(
    ("path", "value", "got", "expected"),
    [
        ("lanes[0].deadline", "2", "'2'", "number (s) > 0, ≤ 86,400"),
        ("lanes[0].deadline", 0, "0", "number (s) > 0"),
        ("lanes[0].deadline", float("nan"), "nan", "number (s) > 0"),
        ("lanes[0].deadline", float("inf"), "inf", "≤ 86,400"),
        ("lanes[0].deadline", None, "null", "number (s)"),
        ("lanes[0].weight", True, "true", "integer ≥ 1, ≤ 1,000"),
        ("lanes[0].weight", 8.5, "8.5", "integer ≥ 1"),
        ("lanes[0].max_prompt_tokens", 0, "0", "integer (tokens) ≥ 1, ≤ 100,000,000, or null"),
        ("lanes[1].tier", "slow", "'slow'", "default | flex"),
        ("lanes[0].name", "Short lane", "'Short lane'", "string like ^[a-z0-9]"),
        ("lanes[0].ttft", 0.1, "0.1", "section with share, seconds"),
        ("lanes[0].ttft.share", 95, "95", "number (share) > 0, < 1"),
        ("lanes[0].ttft.deadline", 5, "5", "no such field; there are share, seconds"),
        ("lanes", [], "a list of 0 items", "list of sections, at least 1"),
        ("lanes", "batch", "'batch'", "list of sections, at least 1"),
        ("lane", 1, "1", "no such field; there are lanes, models, pools"),
        ("models[0].pools", {}, "a section of 0 fields", "mapping of integer ≥ 0, ≤ 100,000, at least 1"),
        ("models[0].pools.baseline", 0.5, "0.5", "integer ≥ 0, ≤ 100,000"),
        ("pools[0].gateway_scheduler", "fifo", "'fifo'", "lanes | passthrough | static-fifo"),
        ("pools[0].start.first_port", 65_536, "65536", "integer ≥ 1, ≤ 65,535"),
        ("gateway.limits.max_body_bytes", -1, "-1", "integer (bytes) ≥ 1"),
        ("pools[0].start.arguments", "--seed", "'--seed'", "list of string"),
        ("rollout.canary_percent", 101, "101", "integer (%) ≥ 0, ≤ 100"),
        ("cache.enabled", "yes please", "'yes please'", "boolean"),
    ],
)
def test_a_wrong_value_is_refused_by_path_value_and_expectation(path: str, value: Any, got: str, expected: str) -> None:
    """Who edits the file at 3 a.m. would have to guess which of forty numbers is meant, and what it may be."""
    [problem] = problems_of(with_value(path, value))
    assert problem.startswith(f"{path}: got {got}, expected ")
    assert expected in problem


@pytest.mark.parametrize("path", ["lanes", "models", "pools", "lanes[0].name", "lanes[2].ttft", "models[0].pools"])
def test_a_missing_field_is_named_with_its_meaning(path: str) -> None:
    """ "Field required" would send the reader to the source."""
    [problem] = problems_of(with_value(path, "~"))
    meaning = {row[0]: row[3] for row in explain()}[path.replace("[0]", "[]").replace("[2]", "[]")]
    assert problem.startswith(f"{path}: missing, expected ")
    assert problem.endswith(meaning)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "lanes",
        "lanes: [",
        "a: 1\na: 2",
        "a: {b: 1, b: 2}",
        "? [a]\n: 1",
        "a: 2026-13-45",
        "a: !!timestamp soon",
        "a: !!bool maybe",
        "a: !!int many",
        "a: !!python/object/apply:os.system [ls]",
        "a: &a [*a]",
        "a: *b",
        "a: " + "[" * 5000,
        "a: \x00",
        "a: " + "9" * 5000,
        "1: 2",
    ],
    ids=range(18),
)
def test_what_is_no_spec_at_all_is_refused(text: str) -> None:
    """A traceback instead of a refusal; while the gateway runs, it would end the task that follows the file."""
    assert all(problems_of(text))


@pytest.mark.parametrize("key", ["lanes: 1\nlanes: 2", "x: {a: 1, a: 2}"])
def test_a_key_that_stands_twice_is_refused_with_its_line(key: str) -> None:
    """YAML drops the first in silence: the value that a reader sees at the top of the file would not count."""
    [problem] = problems_of(key)
    assert "stands twice" in problem
    assert "line " in problem


def test_anchors_and_merges_work() -> None:
    """Lanes that share most of their settings would have to be typed out."""
    text = (ROOT / "laneway.yaml").read_text().replace("success: 0.995", "success: 0.995", 1)
    merged = text.replace("- name: interactive-short", "- &short\n    name: interactive-short").replace(
        "  - name: batch", "  - {<<: *short, name: medium, max_prompt_tokens: 1024}\n  - name: batch"
    )
    medium = parse(merged).lane("medium")
    assert (medium.ttft.seconds, medium.max_prompt_tokens, medium.weight) == (0.1, 1024, 8)


@pytest.mark.parametrize(
    "text",
    [
        f"gateway: {{auth: {{keys: [{{name: a, sha256: {CANARY}}}]}}}}",
        f"gateway: {{auth: {{keys: [{{name: a, key: {CANARY}}}]}}}}",
        f"gateway: {{auth: {{keys: [{CANARY}]}}}}",
        f"gateway: {{auth: {{keys: {CANARY}}}}}",
        f"gateway: {{auth: [{CANARY}]}}",
        f"gateway: [{{keys: {CANARY}}}]",
        f"keys: [{CANARY}]",
        f"gateway: {{key: lw-{CANARY}}}",
        f"gateway: {{key: Bearer sk-{CANARY}}}",
        f"sha256: {CANARY}: x",
        f'sha256: "{CANARY}',
        f"gateway: {{auth: {{keys: [{{name: a, sha256: !!int {CANARY}}}]}}}}",
    ],
)
def test_a_key_typed_into_the_file_is_not_repeated(text: str) -> None:
    """The refusal goes to a terminal, a log and a ticket; the key would go with it."""
    shipped = (ROOT / "laneway.yaml").read_text()
    assert CANARY not in "\n".join(problems_of(f"{shipped}\n{text}\n"))


def test_all_faults_are_told_at_once_and_none_that_only_follows_from_another() -> None:
    """One fault a run is a guessing game, and "too short" for a list of wrong items is a lie."""
    data = shipped()
    data["models"][0]["pools"] = {"baseline": -1}
    data["lanes"][0]["weight"] = 0
    data["surplus"] = 1
    assert [problem.partition(":")[0] for problem in problems_of(yaml.safe_dump(data))] == [
        "lanes[0].weight",
        "models[0].pools.baseline",
        "surplus",
    ]


@pytest.mark.parametrize("make", ["missing", "folder", "binary"])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, make: str) -> None:
    """The reader would not learn which file was looked for."""
    path = tmp_path / "laneway.yaml"
    if make == "folder":
        path.mkdir()
    elif make == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read"):
        load(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([row[0] for row in explain()]), json_values)
def test_any_value_in_any_field_is_taken_or_refused_by_a_path_to_it(path: str, value: Any) -> None:
    """A value that nobody thought of would be a traceback in a running gateway."""
    data = shipped()
    data["pools"][0]["replicas"] = [{"url": "http://127.0.0.1:8000"}]
    data["gateway"] = {"auth": {"keys": [{"name": "a", "sha256": "0" * 64}]}}
    place: Any = data
    steps = path.split(".")
    for step in steps[:-1]:
        place = place.setdefault(step.removesuffix("[]"), {})
        place = place[0] if step.endswith("[]") else place
    place[steps[-1]] = value
    try:
        parse(yaml.safe_dump(data))
        problems = []
    except SpecError as error:
        problems = error.problems
    assert all(": " in problem and "expected" in problem for problem in problems)
    top = path.partition(".")[0].removesuffix("[]")
    assert all(top in problem for problem in problems) or path.endswith("name"), "a name is missed where it is used"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_refused_and_never_crashes(text: str) -> None:
    """An editor's half-written file would end the task that follows the spec."""
    with pytest.raises(SpecError):
        parse(text)


def _all_fields(part: type[BaseModel], prefix: str = "") -> set[str]:
    paths = set()
    for name, info in part.model_fields.items():
        paths.add(f"{prefix}{name}")
        for kind, mark in ((info.annotation, "."), *((a, None) for a in getattr(info.annotation, "__args__", ()))):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                many = mark is None and getattr(info.annotation, "__origin__", None) is tuple
                paths |= _all_fields(kind, f"{prefix}{name}{'[].' if many else '.'}")
    return paths


def test_explain_covers_every_field_with_type_default_and_meaning() -> None:
    """`laneway spec --explain` is the only documentation of the file: a field that is not in it does not exist."""
    rows = list(explain())
    paths = [path for path, *_ in rows]
    assert len(paths) == len(set(paths))
    assert set(paths) == _all_fields(Spec)
    for path, kind, default, meaning in rows:
        assert kind, path
        assert meaning, path
        assert default or kind == "section", path
        if kind.startswith(("number", "integer")):
            assert "≥" in kind or ">" in kind, f"{path} has no lower bound"
            assert "≤" in kind or "<" in kind, f"{path} has no upper bound"


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("lanes[].ttft.seconds", "number (s) > 0, ≤ 86,400", "required"),
        ("lanes[].max_prompt_tokens", "integer (tokens) ≥ 1, ≤ 100,000,000, or null", "null"),
        ("gateway.limits.max_body_bytes", "integer (bytes) ≥ 1, ≤ 1,099,511,627,776", "4194304"),
        ("gateway.auth.required", "boolean", "false"),
        ("strata.output_tokens", "list of integer (tokens) ≥ 1, ≤ 100,000,000", "[64, 256]"),
        ("lanes[].tier", "default | flex", "default"),
        ("models[].pools", "mapping of integer ≥ 0, ≤ 100,000, at least 1", "required"),
        ("gateway", "section", ""),
        ("lanes", "list of sections, at least 1", "required"),
    ],
)
def test_explain_tells_unit_bounds_and_default(path: str, kind: str, default: str) -> None:
    """Seconds typed where milliseconds were thought of are a thousandfold mistake."""
    assert (path, kind, default) in {row[:3] for row in explain()}
