"""What can be checked before anything is started. Every failure is a `UserError` that says what to do."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from cluster.config import ClusterConfig
from cluster.inventory import NodeSnapshot
from cluster.placement import RanksPerModel, left_by, plan_placement, require_plan
from cluster.pool_drafter import drafter_of_pool
from deploy.api_keys import read_api_keys
from deploy.config import DrafthouseConfig, HttpConfig
from deploy.loopback import is_loopback
from deploy.openai.tracing import require_exporter
from deploy.proxies import HAPROXY_OPEN_FILES, HAPROXY_PORTS
from deploy.tls import check_tls
from specdec.core.errors import CheckpointError, ConfigError, ResourceError
from specdec.engine.config import EngineConfig
from specdec.engine.synthetic import require_real
from specdec.model.checkpoint import Checkpoint, open_checkpoint, open_folder
from specdec.model.config import ModelConfig
from specdec.model.stated_positions import positions_of
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_positions import (
    DraftReach,
    heads_warning,
    pool_warning,
    require_positions,
    warnings_about,
    with_positions,
)

_CONNECT_TIMEOUT_S = 5.0


def check_endpoint(http: HttpConfig) -> None:
    """Check the files that the endpoint's settings name, and the packages they need.

    Raises:
        ConfigError: naming what is wrong or missing.
    """
    if http.api_keys_file is not None:
        read_api_keys(http.api_keys_file)
    if http.tls is not None:
        check_tls(http.tls)
    if http.tracing is not None:
        require_exporter()


def check_exposure(http: HttpConfig, *, is_insecure_allowed: bool) -> None:
    """Refuse an address that others can reach when no API key is asked for.

    Raises:
        ConfigError: that is the case, and nobody allowed it.
    """
    if is_loopback(http.host) or http.api_keys_file is not None or is_insecure_allowed:
        return
    raise ConfigError(
        f"http.host {http.host} can be reached from other machines and no API key would be asked for; "
        "set http.api_keys_file, or pass --insecure if that is what you want"
    )


def check_proxy(http: HttpConfig, *, address: str | None) -> None:
    """Refuse a proxy that is not ours to start, or that could not start here.

    Raises:
        ConfigError: Ray runs already, at `address`.
        ResourceError: one of its ports is taken, or it may not open enough files.
    """
    if http.proxy == "python":
        return
    if address is not None:
        raise ConfigError(
            "http.proxy: with --address it is Ray's processes that decide: start them with the variables of "
            "deploy/ray/haproxy.env, and leave it out"
        )
    may_open = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= may_open < HAPROXY_OPEN_FILES:
        raise ResourceError(
            f"http.proxy: haproxy may have to open {HAPROXY_OPEN_FILES} files, and the limit is {may_open} "
            "(ulimit -Hn); raise it, or write python"
        )
    for port in HAPROXY_PORTS.values():
        try:
            _require_free("127.0.0.1", port)
        except OSError as error:
            raise ResourceError(
                f"http.proxy: haproxy cannot listen on 127.0.0.1 port {port}, which it needs: "
                f"{error.strerror}; end what listens there, or write python"
            ) from None


def check_port(http: HttpConfig) -> None:
    """Check that the endpoint's port can be listened on.

    Raises:
        ResourceError: it cannot; says why.
    """
    try:
        _require_free(http.host, http.port)
    except socket.gaierror as error:
        raise ConfigError(f"http.host: {http.host} is not an address: {error.strerror}") from None
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {http.host} port {http.port}: {error.strerror}; choose another with --port"
        ) from None


def _require_free(host: str, port: int) -> None:
    """Raise OSError if one cannot listen there, socket.gaierror if there is no such host."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: a port that is merely waiting for old connections to fade counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)


def check_address(address: str) -> None:
    """Check that somebody listens where a Ray cluster is said to be; Ray itself would try for minutes.

    Raises:
        ResourceError: nobody does.
        ConfigError: it is neither `auto` nor HOST:PORT.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--address must be auto or HOST:PORT, got {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(f"--address: no Ray cluster answers at {address}: {error}") from None


def check_models(engine: EngineConfig) -> None:
    """Check that the model folders are complete, the target long enough, and that tokenizers agree.

    Whether the models are of a kind that can be run, and whether heads fit the target, is left to the
    workers, which load them: their answer is reported as well. Only where the target's weights are damaged
    or missing it is told here, and first.

    Raises:
        CheckpointError, ConfigError: naming the folder or file and the cause.
        ConfigError: what comes out would be made up (`engine.synthetic`), or draft workers would have to
            hold several drafters.
    """
    require_real(engine)
    drafter_of_pool(engine)  # refuses several
    folders = [Path(engine.target.model)]
    drafters = engine.speculative_config.every_drafter
    models = [one for one in drafters if one.model is not None and not one.has_heads]
    folders += [Path(str(one.model)) for one in models]
    try:
        checkpoints = [open_checkpoint(folder) for folder in folders]
    except CheckpointError:
        from specdec.model.on_paper import check_servable  # seconds, which nobody else has to wait for

        check_servable(engine.target)
        raise
    for heads in (one for one in drafters if one.has_heads):
        from specdec.proposers.heads_folder import open_heads

        open_heads(heads, engine.target.model)
    _check_length(engine.target, checkpoints[0])
    for drafter, checkpoint in zip(models, checkpoints[1:], strict=True):
        reach = _draft_reach(drafter, checkpoint, checkpoints[0], engine.target)
        if reach is not None:
            with_positions(drafter, reach)
    vocabularies = [_vocabulary(folder) for folder in folders]
    for drafter, vocabulary in zip(models, vocabularies[1:], strict=True):
        if vocabulary != vocabularies[0]:
            # It says where they differ, at the price of importing transformers.
            from specdec.proposers.draft_model_factory import require_same_tokenizer

            require_same_tokenizer(
                str(drafter.model),
                str(folders[0]),
                trust_draft_code=drafter.trust_remote_code,
                trust_target_code=engine.target.trust_remote_code,
            )


def _check_length(target: ModelConfig, checkpoint: Checkpoint) -> None:
    """Check `target.max_model_len`, where config.json says in plain words how long sequences may be."""
    stated, wanted = positions_of(checkpoint.config), target.max_model_len
    if wanted is not None and stated.num_positions is not None and wanted > stated.num_positions:
        raise ConfigError(
            f"target.max_model_len: {wanted} is more than the {stated.num_positions} positions that "
            f"{checkpoint.path} has (by max_position_embeddings and rope_scaling in its config.json)"
            f"{stated.advice}"
        )


def warnings_of(engine: EngineConfig) -> list[str]:
    """Return what can be run, but may not be meant. The models have been checked (`check_models`)."""
    target = engine.target
    warnings: list[str] = []
    for speculative in engine.speculative_config.every_drafter:
        if speculative.method == "self" and speculative.kv.policy == "full":
            warnings.append(
                "speculative_config.kv.policy: full: with method self a draft token costs what decoding it "
                "costs, which can hardly pay: write policy: streaming"
            )
        warnings += _unheeded(speculative)
        if speculative.model is None:
            continue
        if speculative.has_heads:
            warnings += _warnings_about_heads(speculative, Path(speculative.model), target)
            continue
        draft, served = open_checkpoint(Path(speculative.model)), open_checkpoint(Path(target.model))
        reach = _draft_reach(speculative, draft, served, target)
        if reach is not None:
            speculative = with_positions(speculative, reach)
            warnings += warnings_about(speculative, reach)
            if speculative.cache.num_blocks is not None:
                text = pool_warning(speculative, reach, speculative.cache.num_blocks)
                warnings += () if text is None else (text,)
    return warnings


def warning_about_gpus(config: DrafthouseConfig, num_gpus: float) -> str | None:
    """Say that target workers which may use a GPU ask for none of those that Ray has, if that is so."""
    models = [
        model
        for model in config.served_models()
        if model.engine.target.device != "cpu" and model.cluster.target_groups.bundle.num_gpus == 0
    ]
    if num_gpus <= 0 or not models:
        return None
    where = f"models.{models[0].name}.cluster" if models[0].suffix else "cluster"
    return (
        f"{where}.target_groups.bundle.num_gpus is 0, and there are {num_gpus:g} GPUs: no worker has one of "
        "its own, all share the first or run on CPUs; write num_gpus: 1 (in draft_pool.bundle too, where "
        "there are draft workers), or target.device: cpu"
    )


def _warnings_about_heads(speculative: SpeculativeConfig, heads: Path, target: ModelConfig) -> Iterator[str]:
    """Say that heads were made for shorter texts than the target serves, as far as config.json says."""
    target_len = target.max_model_len or positions_of(open_folder(target.model).config).num_positions
    text = heads_warning(speculative, heads.name, positions_of(open_folder(heads).config), target_len)
    if text is not None:
        yield text


def _unheeded(speculative: SpeculativeConfig) -> Iterator[str]:
    """Say which settings of `kv` select nothing because there is no policy."""
    remedy = "write kv.policy: streaming, or leave it out" if speculative.attends_to_kv else "leave it out"
    for name in speculative.kv.unheeded:
        yield (
            f"speculative_config.kv.{name}: {getattr(speculative.kv, name)} counts for nothing with "
            f"kv.policy: full, with which drafts attend to everything: {remedy}"
        )


def _draft_reach(
    speculative: SpeculativeConfig, draft: Checkpoint, served: Checkpoint, target: ModelConfig
) -> DraftReach | None:
    """Return how far a draft model reaches, as far as config.json says; None: it does not.

    Raises:
        ConfigError: further is asked for than it has positions.
    """
    stated = positions_of(draft.config)
    if stated.num_positions is not None:
        require_positions(draft.path.name, stated.num_positions, speculative.max_model_len)
    num_positions = speculative.max_model_len or stated.num_positions
    if num_positions is None:
        return None
    return DraftReach(
        name=draft.path.name,
        num_positions=num_positions,
        target_len=target.max_model_len or positions_of(served.config).num_positions,
        num_of_one_kind=stated.original_len,
    )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Return a folder's tokens by text, or None when only transformers can read its tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - the Rust side raises nothing more precise
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def check_local_resources(config: DrafthouseConfig, num_cpus: int) -> None:
    """Check that the workers fit one machine with `num_cpus` CPUs and the GPUs of this one.

    Raises:
        ResourceError: naming what lacks what.
    """
    if not config.cluster.check_resources:
        return
    models = config.served_models()
    available = {"CPU": float(num_cpus), "GPU": _num_gpus([model.cluster for model in models])}
    nodes = [NodeSnapshot(node_id="this machine", available=available, labels={})]
    for model in models:
        has_drafter = drafter_of_pool(model.engine) is not None
        ranks = RanksPerModel.of(model.engine)
        # As many as there may ever be, as the application is built: refused later, it would cost a start.
        cluster = model.cluster.at_most()
        plan = require_plan(plan_placement(cluster, nodes, has_drafter=has_drafter, ranks=ranks))
        nodes = left_by(plan, nodes)


def _num_gpus(clusters: Sequence[ClusterConfig]) -> float:
    """Return the GPUs of this machine, if anybody asks for some."""
    bundles = [
        bundle for cluster in clusters for bundle in (cluster.target_groups.bundle, cluster.draft_pool.bundle)
    ]
    if not any(bundle.num_gpus for bundle in bundles):
        return 0.0
    import torch

    return float(torch.cuda.device_count())


def visible_cpus() -> int:
    """Return the number of CPUs that this process may run on, for Ray to place workers by.

    A container's quota of time is not looked at: workers may share it.
    """
    return len(os.sched_getaffinity(0))
