"""The application builder that Serve config files name: `import_path: deploy.serve_config:build`.

    applications:
      - name: drafthouse
        route_prefix: /
        import_path: deploy.serve_config:build
        args:
          config: {target: {model: /models/target}, http: {api_keys_file: /etc/drafthouse/api-keys}}

Serve calls it in a task somewhere on the cluster: models and the keys' file must be at the same place on all
nodes. Host, port and TLS are Serve's own (`http_options`), not `config.http`'s. A node may have the models
that it loads alone, unless `args.models_everywhere` says that what is missing here is missing everywhere.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client  # Ray has no public form of this
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from deploy.api_keys import read_api_keys
from deploy.application import build_application
from deploy.config import DrafthouseConfig, TlsConfig
from deploy.config_file import parse_config
from deploy.openai.certificates import CertificateFiles
from deploy.openai.tracing import require_exporter
from deploy.preflight import check_models
from deploy.tls import check_tls
from specdec.core.errors import CheckpointError, ConfigError
from specdec.engine.config import EngineConfig
from specdec.engine.synthetic import require_real
from specdec.model.config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArguments:
    """What `args` of the application holds."""

    config: DrafthouseConfig
    """What a configuration file holds."""
    insecure: bool = False
    """Serve whoever reaches the port, without API keys."""
    models_everywhere: bool = False
    """Every node has every model, on a volume that all of them mount: also that which builds this."""


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application. Ray must be connected.

    Raises:
        CheckpointError: a model's folder is damaged, or missing where it is said to be everywhere.
        ConfigError: an argument is wrong, the models do not go together, packages for traces are missing,
            Serve's TLS files cannot be used, or there are no API keys and nobody allowed that.
        ResourceError: the workers do not fit the cluster.
    """
    arguments = parse_arguments(args)
    if arguments.config.http.tracing is not None:
        require_exporter()  # else it would be a door, and so the update, that fails
    for model in arguments.config.served_models():
        _check_models(model.engine, are_everywhere=arguments.models_everywhere)
    keys_file = arguments.config.http.api_keys_file
    if keys_file is not None:
        read_api_keys(keys_file)  # doors do; what is found here costs no running one its place
    certificate = _certificate_of_serve()
    if certificate is not None:
        _check_certificate(certificate)
    return build_application(arguments.config, own=_being_deployed(), certificate=certificate)


def _check_certificate(files: CertificateFiles) -> None:
    """Check the files by which Serve listens, where this node has them: proxies would say it in logs alone.

    That a certificate has expired is no reason to refuse an update: proxies follow its files.

    Raises:
        ConfigError: no server can use them.
    """
    are_here = Path(files.certificate_file).is_file() and Path(files.key_file).is_file()
    if files.passphrase is not None or not are_here:
        return
    try:
        check_tls(TlsConfig(certificate_file=files.certificate_file, key_file=files.key_file))
    except ConfigError as error:
        message = f"http_options.ssl_certfile, ssl_keyfile: {error}"
        if not isinstance(error.__cause__, ssl.SSLCertVerificationError):
            raise ConfigError(message) from error
        logger.warning(message)


def _certificate_of_serve() -> CertificateFiles | None:
    """Return the files by which Serve listens, if any: doors say when they end."""
    try:
        client = _get_global_client(raise_if_no_controller_running=False)
    except (RayError, RayServeException) as error:
        logger.warning(
            "Serve does not say how it listens, so /metrics will not say when that ends: %s", error
        )
        return None
    options = None if client is None else client.http_config
    if options is None or not (options.ssl_certfile and options.ssl_keyfile):
        return None
    return CertificateFiles(
        certificate_file=options.ssl_certfile,
        key_file=options.ssl_keyfile,
        passphrase=options.ssl_keyfile_password,
    )


def _being_deployed() -> frozenset[str] | None:
    """Return the applications that Serve deploys now; None: it does not say.

    Serve does not tell a builder for which application it is called, but counts that one as being deployed
    meanwhile. Where nothing is, a program has called the builder, to deploy later.
    """
    try:
        applications = serve.status().applications
    except (RayError, RayServeException) as error:
        logger.warning("Serve does not say what it deploys, so nobody can tell whose what is: %s", error)
        return None
    names = (name for name, one in applications.items() if one.status == ApplicationStatus.DEPLOYING)
    return frozenset(names) or None


def _check_models(engine: EngineConfig, *, are_everywhere: bool) -> None:
    """Check the models, where this node has them: what is found here costs no running replica its place."""
    require_real(engine)
    drafters = [one for one in engine.speculative_config.every_drafter if one.model is not None]
    folders = [engine.target.model, *(str(one.model) for one in drafters)]
    missing = [folder for folder in folders if not Path(folder).is_dir()]
    if missing and are_everywhere:
        raise CheckpointError(
            f"{missing[0]}: there is no such folder on the node that builds the application, and "
            "args.models_everywhere says that all nodes have the same: correct the path, or what is mounted"
        )
    if missing:
        logger.warning(
            "%s is not on the node that builds the application, so that nobody has checked whether the "
            "models go together: one that cannot be loaded is found out by workers, when what they replace "
            "may have ended",
            missing[0],
        )
    else:
        check_models(engine)
    from specdec.model.stored_shapes import check_stored_shapes  # seconds, for arguments that are wrong

    if engine.target.model not in missing:
        check_stored_shapes(engine.target)
    for drafter in drafters:
        if not drafter.has_heads and str(drafter.model) not in missing:
            # The worker may well ask for less: shapes do not depend on it.
            check_stored_shapes(ModelConfig(model=str(drafter.model)), is_draft=True)


def parse_arguments(args: Mapping[str, Any]) -> ServeArguments:
    """Check the arguments, touching neither Ray nor files.

    Raises:
        ConfigError: naming the key.
    """
    switches = ("insecure", "models_everywhere")
    unknown = sorted(set(args) - {"config", *switches})
    if unknown:
        raise ConfigError(f"args.{unknown[0]}: unknown key; known here: config, {', '.join(switches)}")
    for name in switches:
        if not isinstance(args.get(name, False), bool):
            raise ConfigError(f"args.{name}: must be true or false, got {args[name]!r}")
    insecure = args.get("insecure", False)
    if "config" not in args:
        raise ConfigError("args.config: is required")
    config = parse_config(args["config"])
    if config.http.tls is not None:
        raise ConfigError(
            "args.config.http.tls: it is Serve that listens here: give ssl_certfile and ssl_keyfile in "
            "http_options of this file instead"
        )
    if config.http.proxy != "python":
        raise ConfigError(
            "args.config.http.proxy: it is Ray's processes that decide: start them with the variables of "
            "deploy/ray/haproxy.env, and leave it out here"
        )
    if config.http.api_keys_file is None and not insecure:
        raise ConfigError(
            "no API key would be asked for: set args.config.http.api_keys_file, or args.insecure: true if "
            "that is what you want"
        )
    return ServeArguments(
        config=config, insecure=insecure, models_everywhere=args.get("models_everywhere", False)
    )
