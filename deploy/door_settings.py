"""From the configuration of an application to what an HTTP door is to know of one of its models."""

from __future__ import annotations

from deploy.config import HttpConfig, ServedModel, TlsConfig
from deploy.openai.certificates import CertificateFiles
from deploy.openai.settings import DoorSettings
from specdec.model.config import ModelConfig


def door_settings(
    http: HttpConfig, model: ServedModel, certificate: CertificateFiles | None = None
) -> DoorSettings:
    """Return what the door before a model is to know.

    API keys are no part of it: doors read the file themselves. `certificate`: what clients are shown; None:
    what `http.tls` says.
    """
    scheduler = model.engine.scheduler
    room = model.cluster.target_groups.max_groups * (scheduler.max_num_seqs + scheduler.max_num_waiting)
    return DoorSettings(
        served_model_name=model.name,
        max_body_bytes=http.max_body_bytes,
        max_choices=min(http.max_choices, room),  # more could never be taken in, however long one waits
        max_logprobs=http.max_logprobs,
        max_grammar_bytes=model.engine.grammar.max_bytes,
        request_timeout_s=http.request_timeout_s,
        body_timeout_s=http.body_timeout_s,
        write_timeout_s=http.write_timeout_s,
        max_unread_outputs=http.max_unread_outputs,
        max_deliveries_per_s=http.max_deliveries_per_s,
        niceness=http.niceness,
        stream_keep_alive_s=_keep_alive_s(http),
        resume_window_s=http.resume_window_s,
        failover_timeout_s=model.cluster.failover_timeout_s,
        takes_model_defaults=http.generation_config == "auto",
        share_prefixes_between_keys=http.share_prefixes_between_keys,
        request_classes=frozenset(http.request_classes),
        access_log=http.access_log,
        ray_metrics=http.ray_metrics,
        tracing=http.tracing,
        allowed_origins=http.allowed_origins,
        certificate=certificate or _certificate_of(http.tls),
        parallelism=parallelism_of(model.engine.target),
    )


def _keep_alive_s(http: HttpConfig) -> float | None:
    # Without a resume window streams have no ids, so that readers may take every line for JSON.
    if http.resume_window_s == 0 and "stream_keep_alive_s" not in http.model_fields_set:
        return None
    return http.stream_keep_alive_s or None


def _certificate_of(tls: TlsConfig | None) -> CertificateFiles | None:
    if tls is None:
        return None
    return CertificateFiles(certificate_file=tls.certificate_file, key_file=tls.key_file)


def parallelism_of(target: ModelConfig) -> str:
    """Return the part of the fingerprint that says how a model is divided: tp2, tp1-pp4."""
    stages = f"-pp{target.pipeline_parallel_size}" if target.pipeline_parallel_size > 1 else ""
    return f"tp{target.tensor_parallel_size}{stages}"
