"""Names and labels are what dashboards and alert rules are generated from: a contract."""

import re

from serving.telemetry import catalog, semconv
from serving.telemetry.catalog import METRICS, Kind

LABELS_THAT_GROW = {"request_id", "run_id", "trace_id", "user", "key", "prompt", "session"}


def test_no_metric_has_more_than_three_labels() -> None:
    """Lost: Prometheus, to the product of their values."""
    assert [metric.name for metric in METRICS if len(metric.labels) > 3] == []


def test_only_the_rollouts_info_metric_has_a_label_that_grows() -> None:
    """Lost: Prometheus, slowly, to one series a request."""
    growing = [metric for metric in METRICS if LABELS_THAT_GROW & set(metric.labels)]
    assert growing == [catalog.ROLLOUT_INFO]


def test_names_are_unique_valid_and_say_their_kind() -> None:
    """Lost: the scrape; one bad name and Prometheus takes nothing at all."""
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"(gen_ai_server|laneway)_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.endswith("_info") == (metric.kind is Kind.INFO)
        assert metric.unit
        assert metric.help
        if metric.unit == "s":
            assert metric.name.endswith("_seconds")


def test_what_a_convention_names_has_its_name() -> None:
    """Lost: every dashboard that others wrote for the GenAI conventions."""
    assert catalog.TTFT.name == "gen_ai_server_time_to_first_token_seconds"
    assert catalog.TPOT.name == "gen_ai_server_time_per_output_token_seconds"
    assert catalog.DURATION.name == "gen_ai_server_request_duration_seconds"


def test_every_attribute_that_code_can_name_is_on_the_allow_list() -> None:
    """Lost: the attribute itself; the collector's redaction, generated from the list, would take it out."""
    named = {
        value
        for name, value in vars(semconv).items()
        if name.isupper() and isinstance(value, str) and re.match(r"(gen_ai|http|error|laneway)\.|exemplar$", value)
    }
    assert named == set(semconv.ATTRIBUTES)
    assert set(semconv.EXTRA_ATTRIBUTES.values()) <= set(semconv.ATTRIBUTES)
