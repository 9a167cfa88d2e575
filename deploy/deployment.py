"""The application's life on a connected Ray cluster: start, become ready, be watched, end."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.api import RunTarget
from ray.serve.config import ControllerOptions, HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client  # Ray has no public form of this
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig

from cluster.application import COORDINATOR, pending_groups
from cluster.directory_actor import close_directory
from cluster.start_reports import read_start_reports
from deploy.application import APPLICATION, build_application
from deploy.config import DrafthouseConfig, HttpConfig
from deploy.openai.errors import KEYS_UNREAD
from deploy.tls import own_context
from specdec.core.errors import CheckpointError, ConfigError, DrafthouseError, ResourceError, UserError

_POLL_S = 0.25
_STOP_POLL_S = 0.05
_CALL_TIMEOUT_S = 3.0
_SILENT_S = 10.0
"""Replicas that have not answered for so long are gone, or of no use."""
_WATCH_S = 2.0
_PROBE_TIMEOUT_S = 5.0
_PLACES_S = 5.0
_NO_PLACE_S = 60.0
"""Ray places what it can place within seconds; only an autoscaler may bring a node later."""
_END_S = 15.0
"""What ending the application takes at most beside the drain time."""
logger = logging.getLogger(__name__)
_CAUSE = re.compile(r"specdec\.core\.errors\.(\w+): (.*)")
"""How our own errors look at the end of the traceback that Serve reports."""


_USER_ERRORS: Mapping[str, type[DrafthouseError]] = {
    kind.__name__: kind for kind in (UserError, CheckpointError, ConfigError, ResourceError)
}


class DeploymentFailed(DrafthouseError):
    """The application did not start, or ended by itself."""


class Deployment:
    """One application on the connected cluster."""

    def __init__(
        self,
        config: DrafthouseConfig,
        *,
        show_logs: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is what Serve's processes have to find in theirs; None: they do, as Ray's own do."""
        # Importing Serve has set the level of its logger.
        logging.getLogger("ray.serve").setLevel(logging.INFO if show_logs else logging.WARNING)
        self._config = config
        tls = config.http.tls
        self._verify = None if tls is None else own_context(tls)
        self._environment = environment
        self._said: tuple[str, ...] = ()
        """What the door has said last that waiting may not help against."""
        self._has_started = False
        self._has_served = False

    @property
    def url(self) -> str:
        """How this machine reaches the endpoint."""
        return base_url(self._config.http)

    def start(self) -> None:
        """Deploy. Does not wait until anything is loaded.

        Raises:
            ResourceError: the workers do not fit the cluster, or something else has its place there.
        """
        try:
            self._start()
        except (RayError, RayServeException) as error:
            raise DeploymentFailed(f"Ray could not start the application: {_first_line(error)}") from error

    def _start(self) -> None:
        http = self._config.http
        _check_running_serve(http)
        if self._environment is not None:
            _check_environment(self._environment)
        start_serve(http, self._environment)
        application = build_application(self._config, own={APPLICATION})
        target = RunTarget(application, name=APPLICATION, route_prefix="/", logging_config=_quiet())
        self._has_started = True
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def wait_ready(self) -> Iterator[str]:
        """Yield every now and then how far it is, until a request would be served.

        Raises:
            UserError: a worker found something wrong with what it was given.
            DeploymentFailed: a worker failed otherwise, or it took too long.
        """
        started_s = time.monotonic()
        limit_s = self._config.cluster.startup_timeout_s
        places = _Places()
        while True:
            overview = _overview()
            _raise_if_failed(overview)
            if overview.status == ApplicationStatus.RUNNING and self._answers():
                self._has_served = True
                return
            waited_s = time.monotonic() - started_s
            if waited_s > limit_s:
                without = "".join(f"; no node has room for {one}" for one in _without_place())
                what = ", ".join((_progress(overview), *self._said))
                raise DeploymentFailed(f"not ready after {limit_s:g} s: {what}{without}")
            places.look(waited_s)
            reports = [
                report
                for model in self._config.served_models()
                for report in read_start_reports(model.cluster.namespace)
            ]
            yield ", ".join((_progress(overview), *reports, *self._said))
            time.sleep(_POLL_S)

    def watch(self) -> Iterator[str]:
        """Yield a line whenever the application's state changes; ends only by exceptions.

        Raises:
            DeploymentFailed: the cluster or the application is gone.
        """
        known = ApplicationStatus.RUNNING
        while True:
            time.sleep(_WATCH_S)
            overview = _overview()
            if overview.status != known:
                known = overview.status
                yield f"{known.value.lower()}: {_progress(overview)} {overview.message}".strip()

    def stop(self) -> None:
        """Serve what is running to its end, or to the drain limit, and end the application.

        While it drains, new requests are answered with 503. Serve itself stays, and so does what was there
        before `start` was called, or made it fail.
        """
        if not self._has_started:
            return
        if self._has_served:
            self._drain()
        try:
            serve.delete(APPLICATION, _blocking=False)
            _wait_until_gone(self._config.cluster.drain_timeout_s + _END_S)
        except (RayError, RayServeException) as error:
            logger.warning("the application was lost before it was ended: %s", _first_line(error))
        for model in self._config.served_models():
            close_directory(model.cluster.namespace)

    def _drain(self) -> None:
        """Let the coordinators finish their streams.

        Serve's own deletion would do as well, but it takes the HTTP route away first: clients would get 404
        where they should get 503.
        """
        limit_s = self._config.cluster.drain_timeout_s
        give_up_s = time.monotonic() + limit_s + _END_S
        try:
            pools = [
                serve.get_deployment_handle(COORDINATOR + model.suffix, APPLICATION)
                for model in self._config.served_models()
            ]
        except (RayError, RayServeException) as error:
            logger.warning("no coordinator to be drained: %s", _first_line(error))
            return
        # Who has not answered may have heard it all the same.
        draining = [_DrainingPool(pool) for pool in pools if _ask_replicas(pool, "close_down", limit_s) != []]
        while any(pool.has_streams() for pool in draining):
            if time.monotonic() > give_up_s:
                return
            time.sleep(_STOP_POLL_S)

    def _answers(self) -> bool:
        self._trust_renewed()
        try:
            # This machine itself is asked: a proxy of the environment would look for it on its own.
            answer = httpx.get(
                f"{self.url}/health", timeout=_PROBE_TIMEOUT_S, verify=self._verify or True, trust_env=False
            )
            self._said = _unread_keys(answer)
            return answer.status_code == 200
        except httpx.HTTPError:
            return False

    def _trust_renewed(self) -> None:
        """Trust what the certificate's file holds now, too, as it may have been renewed while models load.

        The one from before stays trusted: proxies may greet with it for a while, or, started without being
        told to follow the file, for as long as they run.
        """
        tls = self._config.http.tls
        if tls is None or self._verify is None:
            return
        with contextlib.suppress(OSError):  # half written: the next look will find it whole
            self._verify.load_verify_locations(cafile=tls.certificate_file)


class _Places:
    """Says so when something waits for a place that nobody has, which the progress alone does not show."""

    def __init__(self) -> None:
        self._waiting: tuple[str, ...] = ()
        self._since_s = 0.0
        self._due_s = 0.0
        self._is_told = False

    def look(self, now_s: float) -> None:
        """Look, if it is time to; log what has been waiting for a minute, once."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _PLACES_S
        waiting = _without_place()
        if waiting != self._waiting:
            self._waiting, self._since_s, self._is_told = waiting, now_s, False
        if waiting and not self._is_told and now_s - self._since_s >= _NO_PLACE_S:
            self._is_told = True
            logger.warning(
                "no node has had room for %g s for %s; it goes on waiting", _NO_PLACE_S, "; ".join(waiting)
            )


def _without_place() -> tuple[str, ...]:
    try:
        return pending_groups(APPLICATION)
    except RayError as error:
        logger.info("nobody says what waits for a place: %s", _first_line(error))
        return ()


class _DrainingPool:
    """The replicas of one deployment, while their last streams end."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._heard_s = time.monotonic()

    def has_streams(self) -> bool:
        """Whether there are streams, as far as is known: one who is late with an answer has not said no."""
        numbers = _ask_replicas(self._handle, "num_streams")
        if numbers is None:
            return time.monotonic() - self._heard_s < _SILENT_S
        self._heard_s = time.monotonic()
        return sum(numbers) > 0


def _ask_replicas(pool: DeploymentHandle[Any], method: str, *args: object) -> list[Any] | None:
    """Return what all replicas of a deployment answer; None: not all have. Nothing where there are none.

    A model that was scaled to zero has none: that must not keep the others from being asked.
    """
    try:
        return list(pool.broadcast(method, *args).results(timeout_s=_CALL_TIMEOUT_S))
    except DeploymentUnavailableError:
        return []
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("%s does not say how it drains: %s", pool.deployment_name, _first_line(error))
        return None


def start_serve(http: HttpConfig, environment: Mapping[str, str] | None = None) -> None:
    """Start Serve, unless it runs.

    Args:
        http: what its proxy is to do.
        environment: for its controller, and so for the proxies and replicas that this starts; None: what
            Ray's own processes have is all they need.
    """
    its_own = None if environment is None else {"env_vars": dict(environment)}
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=http_options(http),
        logging_config=_quiet(),
        controller_options=None if its_own is None else ControllerOptions(runtime_env=its_own),
    )


def missing_environment(wanted: Mapping[str, str]) -> dict[str, str]:
    """Return what a Serve that runs already does not have in its controller's environment, of what it should.

    Its proxies have the same. Nothing is missing where none runs.

    Raises:
        RayError: the controller does not answer.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}

    def environment(_: object) -> dict[str, str]:  # local: it is sent whole, and needs nothing there
        import os

        return {name: os.environ[name] for name in wanted if name in os.environ}

    has = ray.get(client._controller.__ray_call__.remote(environment), timeout=_CALL_TIMEOUT_S)
    return {name: value for name, value in wanted.items() if has.get(name) != value}


def _check_environment(wanted: Mapping[str, str]) -> None:
    """Warn of what a Serve that runs already does not do, because it was started without being told."""
    try:
        missing = missing_environment(wanted)
    except RayError as error:
        logger.warning("Serve does not say what is in its environment: %s", _first_line(error))
        return
    if missing:
        logger.warning(
            "Ray Serve runs on this cluster already, started without %s: clients that do not read, or "
            "headers, have no limits, or what hangs is drained first (docs/operations/door.md, Overload). "
            "Shut it down to have it started with them, or start Ray with them",
            " ".join(f"{name}={value}" for name, value in missing.items()),
        )


def http_options(http: HttpConfig) -> HTTPOptions:
    """Return what Serve's proxy is to do."""
    tls = http.tls
    return HTTPOptions(
        host=http.host,
        port=http.port,
        # Ours ends a request with an answer; Serve's would cut it.
        request_timeout_s=None,
        keep_alive_timeout_s=http.keep_alive_timeout_s,
        # The key first: Serve checks the certificate's field against it.
        ssl_keyfile=None if tls is None else tls.key_file,
        ssl_certfile=None if tls is None else tls.certificate_file,
    )


def base_url(http: HttpConfig) -> str:
    """Return the URL by which this machine reaches the endpoint."""
    scheme = "http" if http.tls is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(http.host, http.host)
    return f"{scheme}://[{host}]:{http.port}" if ":" in host else f"{scheme}://{host}:{http.port}"


def _unread_keys(answer: httpx.Response) -> tuple[str, ...]:
    """Return what a door says that cannot read its API keys; nothing where that is not so."""
    return (answer.json()["error"]["message"],) if KEYS_UNREAD in answer.text else ()


def _overview() -> ApplicationStatusOverview:
    try:
        overview = serve.status().applications.get(APPLICATION)
    except (RayError, RayServeException) as error:
        raise DeploymentFailed(f"the Ray cluster was lost: {_first_line(error)}") from error
    if overview is None:
        raise DeploymentFailed("the application is not there any more")
    return overview


def _check_running_serve(http: HttpConfig) -> None:
    """Check that Serve, if it runs on this cluster already, has a place for the application.

    Serve has one HTTP address per cluster: asked for another one, it would keep the first and merely log so.

    Raises:
        ResourceError: it listens elsewhere, or runs an application of this name.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    running = client.http_config
    if (running.host, running.port) != (http.host, http.port):
        raise ResourceError(
            f"Ray Serve runs on this cluster already and listens on {running.host} port {running.port}, not "
            f"on {http.host} port {http.port}; give --host {running.host} --port {running.port}, or shut the "
            "running Serve down first"
        )
    wanted = http_options(http)
    if (running.ssl_certfile, running.ssl_keyfile) != (wanted.ssl_certfile, wanted.ssl_keyfile):
        raise ResourceError(
            "Ray Serve runs on this cluster already, "
            + (f"with the certificate {running.ssl_certfile}" if running.ssl_certfile else "without TLS")
            + "; give http.tls as it has it, or shut the running Serve down first"
        )
    if APPLICATION in serve.status().applications:
        raise ResourceError(
            f"an application named {APPLICATION} runs on this cluster already; stop that one first"
        )


def _wait_until_gone(limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while APPLICATION in serve.status().applications:
        if time.monotonic() > until_s:
            logger.warning("the application has not ended after %g s", limit_s)
            return
        time.sleep(_STOP_POLL_S)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _progress(overview: ApplicationStatusOverview) -> str:
    """Return which deployments are up: `Coordinator starting, DraftPool ready`."""
    parts = []
    for name, deployment in overview.deployments.items():
        num_running = sum(number for state, number in deployment.replica_states.items() if state == "RUNNING")
        num_all = sum(deployment.replica_states.values())
        parts.append(f"{name} {'ready' if num_all and num_running == num_all else 'starting'}")
    return ", ".join(parts) or "placing the workers"


def _raise_if_failed(overview: ApplicationStatusOverview) -> None:
    if overview.status != ApplicationStatus.DEPLOY_FAILED:
        return
    messages = [overview.message, *(deployment.message for deployment in overview.deployments.values())]
    for message in messages:
        for name, text in reversed(_CAUSE.findall(message)):
            raise _USER_ERRORS.get(name, DeploymentFailed)(text)
    raise DeploymentFailed("\n".join(message for message in messages if message))


def _quiet() -> LoggingConfig:
    return LoggingConfig(log_level="WARNING", enable_access_log=False)
