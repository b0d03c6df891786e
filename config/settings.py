"""All settings of the process: `SAMEBITS_*` variables, command-line flags and a profile file,
checked once.

Flags win over the environment, the environment over the profile, the profile over the defaults.
Settings are frozen; an unknown or malformed key stops the start. Keys that mean what vLLM's option
means carry vLLM's name. This is the only module that reads `os.environ`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_dir
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

PREFIX = "SAMEBITS_"
DEMO_MODEL = "smollm2-135m-instruct"
PROFILES = Path(__file__).parent / "profiles"
# Read by the plugin in processes that have no Settings object, or only by the build; not fields of
# Settings.
OTHER_KEYS = frozenset(
    {"SAMEBITS_PROFILE", "SAMEBITS_CXX", "SAMEBITS_KERNELS", "SAMEBITS_CACHE_DIR"}
)


class SettingsError(ValueError):
    """One or more settings are unknown or malformed. The message names key, value and what was
    expected.
    """


class Settings(BaseSettings):
    """Every setting, with its default and meaning. Times in seconds, sizes in bytes, lengths in
    tokens.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        protected_namespaces=(),
        env_file_encoding="utf-8",
    )

    # --- model: vLLM's own names
    model: str = Field(
        DEMO_MODEL, description="Hugging Face folder or id; the default is the demo model"
    )
    served_model_name: str | None = Field(
        None, description="name in the API; default: the model as given"
    )
    tokenizer: str | None = Field(None, description="folder or id, if not the model's own")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of weights and activations"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="context length; default: the model's"
    )
    load_format: str = Field("auto", description="how weights are read")
    chat_template: str | None = Field(None, description="file with a chat template")
    tool_call_parser: str | None = Field(None, description="vLLM's parser for tool_choice auto")
    quantization: str | None = Field(None, description="refused until proven invariant")

    # --- scheduling: vLLM's own names; none of these changes a bit of any answer
    max_num_seqs: int = Field(64, ge=1, description="requests in one batch")
    max_num_batched_tokens: int = Field(2048, ge=16, description="tokens in one batch")
    block_size: int | None = Field(None, ge=16, description="tokens per KV block")
    enable_prefix_caching: bool = Field(True, description="reuse KV of common prefixes")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of device memory")
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="KV cache; default on CPU: 1 GiB"
    )
    num_gpu_blocks_override: int | None = Field(None, ge=1, description="KV blocks, for tests")
    tensor_parallel_size: int = Field(1, ge=1, description="devices that share one model")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads; default: all cores allowed"
    )
    enforce_eager: bool | None = Field(None, description="no graphs; forced on the CPU")
    max_logprobs: int = Field(
        20, ge=0, description="most alternatives per token that a request may ask for"
    )

    # --- determinism
    device: Literal["auto", "cpu", "cuda", "npu"] = Field("auto", description="where to run")
    determinism: Literal["on", "off"] = Field(
        "on", description="off: plain vLLM, no promise, and loud about it"
    )
    seed_policy: str = Field("assign", description="assign | require | fixed:<n>")

    # --- server
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    root_path: str = Field("", description="prefix that a proxy strips")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug"] = Field("warning")
    log_format: Literal["console", "json"] = Field("console", description="shape of the log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info")
    api_keys: str | None = Field(None, description="keys, separated by commas")
    api_keys_file: str | None = Field(None, description="file with one key per line")
    cors_origins: str = Field("", description="origins, separated by commas; empty: CORS off")
    ssl_keyfile: str | None = Field(None)
    ssl_certfile: str | None = Field(None)
    strict: bool = Field(True, description="unknown request fields are a 400, not a warning")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="largest request body")
    max_prompts: int = Field(256, ge=1, description="prompts in one request")
    max_n: int = Field(128, ge=1, description="choices per prompt")
    max_choices: int = Field(1024, ge=1, description="prompts × n in one request")
    max_stop: int = Field(4, ge=0, description="stop strings")
    max_stop_chars: int = Field(1024, ge=1, description="length of one stop string")
    max_logit_bias: int = Field(1024, ge=0, description="logit_bias entries")
    max_bad_words: int = Field(256, ge=0, description="bad_words entries")
    max_json_depth: int = Field(64, ge=4, description="nesting of the request body")
    max_grammar_chars: int = Field(65_536, ge=1, description="length of a schema or grammar")
    max_grammar_s: float = Field(5.0, gt=0, description="processor time to compile one grammar")
    max_queue: int = Field(2048, ge=1, description="choices in the engine at once; above: 429")
    request_timeout_s: float = Field(600.0, gt=0, description="longest time for one request")
    drain_s: float = Field(30.0, ge=0, description="time for open requests after SIGTERM")
    step_timeout_s: float = Field(4.0, gt=0, description="no engine step for this long: not ready")
    stall_timeout_s: float = Field(
        60.0, gt=0, description="not ready for this long: open requests end with an error"
    )
    otlp_endpoint: str | None = Field(None, description="OpenTelemetry traces go there")
    page: bool = Field(True, description="GET / shows a page")

    # --- evidence
    receipts: str | None = Field(
        None, description="JSON-lines file that every receipt is appended to"
    )
    receipts_content: Literal["full", "digests"] = Field(
        "full", description="digests: not replayable"
    )
    receipts_max_bytes: int = Field(256 << 20, ge=4096, description="size at which the log rotates")
    receipts_fsync: bool = Field(False, description="fsync after each line")
    receipts_on_error: Literal["refuse", "serve"] = Field(
        "refuse", description="when the log can't be written"
    )
    receipts_key_file: str | None = Field(
        None, description="Ed25519 private key (PEM) that signs receipts"
    )

    @field_validator("seed_policy")
    @classmethod
    def _seed_policy(cls, value: str) -> str:
        kind, _, number = value.partition(":")
        if value in ("assign", "require"):
            return value
        try:
            if kind == "fixed" and -(2**63) <= int(number) < 2**63:
                return value
        except ValueError:
            pass
        raise ValueError('expected "assign", "require" or "fixed:<int64>"')

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then profile; no secrets directory."""
        return init_settings, env_settings, dotenv_settings


def load(flags: Mapping[str, Any] | None = None, *, profile: str | None = None) -> Settings:
    """Read and check all settings. Raises `SettingsError` with one line per fault."""
    profile = profile or os.environ.get("SAMEBITS_PROFILE") or None
    known = {PREFIX + name.upper() for name in Settings.model_fields} | OTHER_KEYS
    faults = [
        _unknown(key, os.environ[key], known)
        for key in sorted(os.environ)
        if key.upper().startswith(PREFIX) and key.upper() not in known
    ]
    if faults:
        raise SettingsError("\n".join(faults))
    path = None if profile is None else profile_path(profile)
    if path is not None:
        _check_profile(path, known)
    try:
        given = {key: value for key, value in (flags or {}).items() if value is not None}
        return Settings(_env_file=path, **given)  # type: ignore[call-arg]
    except ValidationError as fault:
        raise SettingsError("\n".join(_malformed(e) for e in fault.errors())) from None


def profile_path(profile: str) -> Path:
    """The file of a profile: a path, or the name of one that ships (cpu, cuda, ascend-a2,
    ascend-a3).
    """
    for path in (PROFILES / f"{profile}.env", Path(profile)):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(p.stem for p in PROFILES.glob("*.env")))
    raise SettingsError(
        f"profile {profile!r}: no such file, and none of the shipped ones ({shipped})"
    )


def determinism_mode() -> str:
    """Return "on" or "off", for processes that vLLM starts; anything else stops
    the process.
    """
    mode = os.environ.get("SAMEBITS_DETERMINISM", "").strip().lower() or "on"
    if mode not in ("on", "off"):
        raise SettingsError(f"SAMEBITS_DETERMINISM={mode}: expected on or off")
    return mode


def environment() -> Mapping[str, str]:
    """A copy of the environment, for the parts that check it for conflicts."""
    return dict(os.environ)


def _check_profile(path: Path, known: set[str]) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        key = line.split("=", 1)[0].strip().removeprefix("export ").strip()
        if not key or key.startswith("#"):
            continue
        if key.upper() not in known:
            raise SettingsError(
                f"{path.name} line {number}: " + _unknown(key, line.partition("=")[2], known)
            )


def _unknown(key: str, value: str, known: set[str]) -> str:
    from config import determinism  # which imports this module

    refused = determinism.not_offered(key.upper().removeprefix(PREFIX).lower())
    if refused:
        return f"{key}={value}: {refused}"
    near = difflib.get_close_matches(key.upper(), known, 1)
    hint = f"; did you mean {near[0]}?" if near else "; see `samebits serve --help`"
    return f"{key}={value}: unknown setting{hint}"


def _malformed(error: Mapping[str, Any]) -> str:
    key = PREFIX + "_".join(str(part) for part in error["loc"]).upper()
    return f"{key}={error['input']}: {error['msg']}"


def cache_dir() -> Path:
    """Where models, built kernels and hashes are kept: SAMEBITS_CACHE_DIR, or the user's cache."""
    return Path(os.environ.get("SAMEBITS_CACHE_DIR") or user_cache_dir("samebits"))
