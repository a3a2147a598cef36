"""`laneway engine …`: starts a replica, real or simulated."""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from serving.spec import Spec, SpecError, load

engine_app = typer.Typer(no_args_is_help=True, help="Start an engine replica: real vLLM, or a simulated one.")

SPEC = Path("laneway.yaml")
BAD_INPUT = 2
UNAVAILABLE = 4


@engine_app.command("vllm", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def vllm(
    context: typer.Context,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: Annotated[str | None, typer.Option(help="Folder or hub name; without it, a tiny random model.")] = None,
    name: Annotated[str | None, typer.Option(help="What requests call the model.")] = None,
    scheduler: Annotated[str, typer.Option(help="Who plans the engine's steps: vllm.")] = "vllm",
    python: Annotated[Path | None, typer.Option(help="Interpreter that has vLLM.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests computed at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of one engine step.")] = None,
    long_prefill_token_threshold: Annotated[
        int | None,
        typer.Option(min=0, help="Most tokens of one request in one step while there are others; 0: no bound."),
    ] = None,
    max_num_queued_reqs: Annotated[int | None, typer.Option(min=1, help="Refuse (503) beyond so many.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV cache of equal prompt beginnings.")] = True,
    kv_cache_gib: Annotated[int, typer.Option(min=1, help="CPU build: size of the KV cache (GiB).")] = 1,
    cpu_core: Annotated[int | None, typer.Option(min=0, help="Pin the replica to this core.")] = None,
    spec: Annotated[Path | None, typer.Option(help="Spec whose objectives become histogram bounds.")] = None,
) -> None:
    """Serve a real vLLM replica. What follows `--` is passed to vLLM as it is."""
    from serving.engine import buckets
    from serving.engine.vllm import TINY_NAME, EngineMissingError, VllmOptions, find_python, run, tiny_model_folder

    if scheduler != "vllm":
        _refuse(f"--scheduler: got {scheduler!r}, expected 'vllm'")
    loaded = _spec(spec)
    try:
        interpreter = find_python(python, os.environ)
        run(
            VllmOptions(
                python=interpreter,
                model=model or str(tiny_model_folder(interpreter, os.environ)),
                name=name or (None if model else TINY_NAME),
                host=host,
                port=port,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_token_threshold=long_prefill_token_threshold,
                max_num_queued_reqs=max_num_queued_reqs,
                prefix_caching=prefix_caching,
                kv_cache_gib=kv_cache_gib,
                cpu_core=cpu_core,
                buckets={} if loaded is None else buckets.from_spec(loaded),
                arguments=tuple(context.args),
            ),
            os.environ,
        )
    except EngineMissingError as error:
        _refuse(str(error), UNAVAILABLE)


@engine_app.command("simulate")
def simulate(
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    profile: Annotated[
        Path | None, typer.Option(help="Step-time model (JSON, as `laneway calibrate` makes it).")
    ] = None,
    scheduler: Annotated[str, typer.Option(help="Who plans the engine's steps: fcfs.")] = "fcfs",
    name: Annotated[str, typer.Option(help="What requests call the model.")] = "laneway-tiny",
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json; without it, the tiny model's.")] = None,
    max_model_len: Annotated[int, typer.Option(min=2, help="Prompt and output of one request, tokens.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests computed at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one engine step.")] = 2048,
    long_prefill_token_threshold: Annotated[
        int, typer.Option(min=0, help="Most tokens of one request in one step while there are others; 0: no bound.")
    ] = 0,
    max_num_queued_reqs: Annotated[int | None, typer.Option(min=1, help="Refuse (503) beyond so many.")] = None,
    max_num_queued_tokens: Annotated[int | None, typer.Option(min=1, help="The same, prompt tokens.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV cache of equal prompt beginnings.")] = True,
    spec: Annotated[Path | None, typer.Option(help="Spec whose objectives become histogram bounds.")] = None,
) -> None:
    """Serve a replica that computes nothing and takes the time that vLLM would."""
    from tokenizers import Tokenizer

    from serving.engine import buckets, step_time
    from serving.engine.sequence import EngineLimits
    from serving.engine.simulated_app import SimulatedOptions, serve
    from serving.telemetry.otlp import OtlpSettingError

    loaded = _spec(spec)
    try:
        words = None if tokenizer is None else Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises nothing more specific
        _refuse(f"--tokenizer: {tokenizer} cannot be read ({error}), expected a tokenizer.json")
    try:
        serve(
            SimulatedOptions(
                profile=step_time.DEFAULT if profile is None else step_time.load(profile),
                limits=EngineLimits(
                    max_num_seqs,
                    max_num_batched_tokens,
                    max_model_len,
                    prefix_caching,
                    scheduler,
                    long_prefill_token_threshold,
                ),
                name=name,
                host=host,
                port=port,
                max_num_queued_reqs=max_num_queued_reqs,
                max_num_queued_tokens=max_num_queued_tokens,
                bounds=None if loaded is None else buckets.from_spec(loaded),
                tokenizer=words,
            ),
            os.environ,
        )
    except (step_time.ProfileError, OtlpSettingError, ValueError) as error:
        _refuse(str(error))


def _spec(path: Path | None) -> Spec | None:
    """The spec named, else the one in this folder, else none."""
    if path is None and not SPEC.is_file():
        return None
    try:
        return load(path or SPEC)
    except SpecError as error:
        _refuse(str(error))


def _refuse(message: str, code: int = BAD_INPUT) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(code)
