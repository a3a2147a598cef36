"""Specs and tickets for the scheduling tests."""

from serving import spec


def lane(name: str = "a", **settings: object) -> spec.Lane:
    """A lane with a 100 ms objective (wait limit 80 ms) and a deadline of 2 s, unless said otherwise."""
    return spec.Lane.model_validate(
        {"name": name, "ttft": spec.Objective(seconds=0.1), "deadline": 2.0, **settings}  # strict: tuples and models
    )


def pool(**settings: object) -> spec.Pool:
    """A pool with one replica, the spec's defaults unless said otherwise."""
    return spec.Pool.model_validate({"name": "p", "replicas": (spec.Replica(url="http://127.0.0.1:8000"),), **settings})
