"""Replicas that the integration tests share: started once a session, when the first test asks for them."""

from collections.abc import Iterator

import pytest

from tests.integration.replicas import SIMULATED_START_SECONDS, VLLM_START_SECONDS, replica


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM that serves the tiny model as `laneway-tiny`; prefix caching is on."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    with replica(log, "vllm", seconds=VLLM_START_SECONDS) as url:
        yield url


@pytest.fixture(scope="session")
def simulated_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A simulated replica with the default profile."""
    log = tmp_path_factory.mktemp("simulated") / "log"
    with replica(log, "simulate", seconds=SIMULATED_START_SECONDS) as url:
        yield url
