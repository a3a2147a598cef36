"""The profile file: what is in it, and how a wrong one is refused."""

from pathlib import Path

import pytest

from serving.engine.step_time import DEFAULT, Profile, ProfileError, dump, load, parse


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    """A calibration that came back changed would be worse than none."""
    profile = Profile(step_ms=3.25, kv_blocks=77, attention_ms=1.5e-5)
    file = tmp_path / "profile.json"
    file.write_text(dump(profile, {"engine": "somewhere", "r2": 0.97}))
    assert load(file) == profile


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "p.json: got list, expected an object"),
        ({"step_ms": -1}, "p.json: step_ms: got -1, expected milliseconds of at least 0"),
        ({"step_ms": 0}, "p.json: step_ms: got 0, expected more"),
        ({"decode_ms": "fast"}, "p.json: decode_ms: got 'fast', expected milliseconds"),
        ({"decode_ms": float("nan")}, "p.json: decode_ms: got nan, expected milliseconds"),
        ({"decode_ms": True}, "p.json: decode_ms: got True, expected milliseconds"),
        ({"kv_blocks": 1}, "p.json: kv_blocks: got 1, expected a whole number of at least 2"),
        ({"block_size": 1.5}, "p.json: block_size: got 1.5, expected a whole number"),
        ({"prefil_ms": 1}, "p.json: prefil_ms: got 1, expected no such field; there are attention_ms, "),
    ],
)
def test_a_wrong_profile_is_refused_by_field_value_and_expectation(data: object, message: str) -> None:
    """Whoever mistypes a coefficient must read which one, not debug a replica that is oddly fast."""
    with pytest.raises(ProfileError) as refusal:
        parse(data, "p.json")
    assert message in str(refusal.value)


def test_a_file_that_is_no_json_is_refused_by_name(tmp_path: Path) -> None:
    """The message must lead to the file."""
    file = tmp_path / "broken.json"
    file.write_text("{")
    for path in (file, tmp_path / "absent.json"):
        with pytest.raises(ProfileError, match=path.name):
            load(path)


def test_a_long_context_makes_the_same_tokens_dearer() -> None:
    """The reason why a cap on tokens is no cap on time, and why the model has that term."""
    short = DEFAULT.step_seconds(512, 1, 512 * 256, 0, 0)
    late = DEFAULT.step_seconds(512, 1, 512 * 6256, 0, 0)
    assert late > 5 * short
