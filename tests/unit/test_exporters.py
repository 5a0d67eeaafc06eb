# SPDX-License-Identifier: Apache-2.0
"""Each exporter hands real saves and loads to its library, which then has the numbers of the report."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, LoadReport, SaveReport
from bytecheckpoint.errors import CheckpointExistsError, CheckpointNotFoundError
from bytecheckpoint.observability import CallFailure, flush, read_journal
from bytecheckpoint.observability.exporters import (
    LoggingExporter,
    OpenTelemetryExporter,
    PrometheusExporter,
    TensorBoardExporter,
)
from bytecheckpoint.observability.exporters.metrics import METRICS, measurements_of, phases_of, scalars_of

STATE = {"weight": torch.arange(3000.0), "step": 7}
SAVE_PHASES = {"plan", "global_plan", "begin", "exchange", "write", "wait", "assemble", "commit", "sweep"}


@pytest.fixture
def observed() -> Iterator[Any]:
    """Returns a function that makes an exporter observe until the end of the test."""
    exporters: list[Any] = []

    def observe(exporter: Any) -> Any:
        bytecheckpoint.observe(exporter)
        exporters.append(exporter)
        return exporter

    yield observe
    for exporter in exporters:
        bytecheckpoint.stop_observing(exporter)


def save(path: Path) -> SaveReport:
    return bytecheckpoint.save_state_dict(path, dict(STATE), no_dist=True)


def load(path: Path) -> LoadReport:
    config = bytecheckpoint.Config(journal=f"{path.parent}/.bcp")  # a load is recorded only where somebody says so
    return bytecheckpoint.load_state_dict(path, {"weight": torch.zeros(3000), "step": 0}, no_dist=True, config=config)


def fail_to_save(path: Path) -> None:
    with pytest.raises(CheckpointExistsError):
        bytecheckpoint.save_state_dict(path, dict(STATE), no_dist=True, overwrite=False)


def record(run: Path, kind: str) -> dict[str, Any]:
    assert flush()
    return [each for each in read_journal(run)[0] if each["kind"] == kind][-1]


def test_the_phases_of_a_record_add_up(tmp_path: Path) -> None:
    saved, loaded = save(tmp_path / "step_3"), load(tmp_path / "step_3")
    for kind, report in (("save", saved), ("load", loaded)):
        phases = phases_of(record(tmp_path, kind))
        assert len(phases) > 3
        ends = [begin + length for _, begin, length in phases]
        assert [begin for _, begin, _ in phases] == pytest.approx([0.0, *ends[:-1]])
        assert ends[-1] == pytest.approx(report.total_s, abs=1e-4)
        numbers = scalars_of(record(tmp_path, kind))
        assert numbers[f"checkpoint/{kind}_duration_s"] == pytest.approx(report.total_s, abs=1e-6)
    assert scalars_of(record(tmp_path, "save"))["checkpoint/save_size_bytes"] == saved.total_bytes
    assert scalars_of(record(tmp_path, "load"))["checkpoint/load_read_size_bytes"] == loaded.total_bytes_read


def test_records_of_other_versions_do_no_harm() -> None:
    for of_other in ({"kind": "save"}, {"kind": "load", "report": {"total_s": None, "new_s": 1.0}}):
        assert list(measurements_of(of_other)) == []
        assert scalars_of(of_other) == {}


def test_names_are_as_conventions_ask() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.unit in ("s", "By")
        assert metric.name.startswith(("checkpoint.save.", "checkpoint.load."))
        assert not metric.name.endswith(("_s", "seconds", "bytes", "total")), "OpenTelemetry: no units in names"
        assert list(metric.buckets) == sorted(metric.buckets)


def test_opentelemetry(tmp_path: Path, observed: Any) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, spans, tracer_provider = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(spans))
    observed(OpenTelemetryExporter(MeterProvider([reader]), tracer_provider))
    path = tmp_path / "step_12"
    with tracer_provider.get_tracer("training").start_as_current_span("training step") as of_training:
        report = save(path)
        assert flush()
    load(path)
    fail_to_save(path)
    assert flush()

    data: Any = reader.get_metrics_data()
    points = {
        metric.name: (metric.unit, metric.data.data_points)
        for of_resource in data.resource_metrics
        for scope in of_resource.scope_metrics
        for metric in scope.metrics
    }
    unit, (duration,) = points["checkpoint.save.duration"]
    assert (unit, duration.count, duration.attributes) == ("s", 1, {"checkpoint.mode": "sync"})
    assert duration.sum == pytest.approx(report.total_s, abs=1e-6)
    unit, (size,) = points["checkpoint.save.size"]
    assert (unit, size.sum) == ("By", report.total_bytes)
    unit, phases = points["checkpoint.save.phase.duration"]
    assert {point.attributes["checkpoint.phase"] for point in phases} == SAVE_PHASES
    unit, (failures,) = points["checkpoint.save.failures"]
    assert (unit, failures.value, failures.attributes) == ("{failure}", 1, {"error.type": "CheckpointExistsError"})
    assert points["checkpoint.load.size"][1][0].sum > 12_000

    of_call, *_ = [span for span in spans.get_finished_spans() if span.name == "checkpoint.save"]
    assert of_call.parent is not None
    assert of_call.parent.span_id == of_training.get_span_context().span_id
    assert of_call.start_time == round(report.began_at * 1e9)
    assert of_call.end_time == of_call.start_time + round(report.total_s * 1e9)
    attributes = dict(of_call.attributes or {})
    assert attributes["checkpoint.step"] == 12
    assert attributes["checkpoint.save_id"] == report.save_id
    children = [s for s in spans.get_finished_spans() if s.parent and s.parent.span_id == of_call.context.span_id]
    assert {child.name for child in children} == {f"checkpoint.save.{phase}" for phase in SAVE_PHASES}
    for before, after in itertools.pairwise(children):
        assert before.end_time is not None
        assert after.start_time is not None
        assert abs(before.end_time - after.start_time) <= 1
    assert children[0].start_time == of_call.start_time
    of_failure = spans.get_finished_spans()[-1]
    assert of_failure.name == "checkpoint.save"
    assert not of_failure.status.is_ok


def test_prometheus(tmp_path: Path, observed: Any) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    observed(PrometheusExporter(registry))
    report = save(tmp_path / "step_1")
    load(tmp_path / "step_1")
    fail_to_save(tmp_path / "step_1")
    assert flush()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("checkpoint_save_duration_seconds_count", mode="sync") == 1
    assert value("checkpoint_save_duration_seconds_sum", mode="sync") == pytest.approx(report.total_s, abs=1e-6)
    assert value("checkpoint_save_size_bytes_sum", mode="sync") == report.total_bytes
    assert value("checkpoint_save_phase_duration_seconds_count", phase="write") == 1
    assert value("checkpoint_load_duration_seconds_count", reading="independent") == 1
    assert value("checkpoint_save_failures_total", error_type="CheckpointExistsError") == 1
    assert value("checkpoint_save_last_success_timestamp_seconds") == report.began_at + report.total_s
    assert b"# TYPE checkpoint_save_failures_total counter" in generate_latest(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusExporter(registry)


@pytest.mark.parametrize("own", [False, True])
def test_tensorboard(tmp_path: Path, observed: Any, own: bool) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "tb")) if own else None
    exporter = observed(TensorBoardExporter(writer or tmp_path / "tb"))
    reports = [save(tmp_path / f"step_{step}") for step in (10, 20)]
    save(tmp_path / "last")
    assert flush()
    exporter.close()
    if writer is not None:
        writer.add_scalar("loss", 0.5)  # it is still the user's
        writer.close()
    charts = EventAccumulator(str(tmp_path / "tb"))
    charts.Reload()
    points = charts.Scalars("checkpoint/save_duration_s")
    assert [point.step for point in points] == [10, 20, 2]
    assert points[0].value == pytest.approx(reports[0].total_s, rel=1e-4, abs=1e-6)
    assert charts.Scalars("checkpoint/save_size_bytes")[1].value == reports[1].total_bytes
    assert "checkpoint/save_phase_duration_s/write" in charts.Tags()["scalars"]


OFFLINE_RUN = """
import json, sys
import torch, wandb, bytecheckpoint
from bytecheckpoint.observability import flush
from bytecheckpoint.observability.exporters import WandbExporter

folder = sys.argv[1]
try:
    WandbExporter()
except bytecheckpoint.CheckpointError as error:
    assert "there is no current run" in str(error)
else:
    raise AssertionError
settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
with wandb.init(mode="offline", dir=folder, project="p", settings=settings) as run:
    bytecheckpoint.observe(WandbExporter())
    report = bytecheckpoint.save_state_dict(folder + "/step_5", {"weight": torch.arange(3000.0)}, no_dist=True)
    assert flush()
    run.log({"loss": 0.5})
    print(json.dumps([report.total_s, report.total_bytes, run.step, {k: run.summary[k] for k in run.summary.keys()}]))
"""


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    """In a process of its own: wandb leaves threads and files until the process ends."""
    own = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    environment = {**os.environ, **own, "TMPDIR": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-c", OFFLINE_RUN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    total_s, total_bytes, num_steps, row = json.loads(done.stdout.splitlines()[-1])
    assert num_steps == 1, "the steps of the run are the user's"
    assert row["loss"] == 0.5
    assert row["checkpoint/step"] == 5
    assert row["checkpoint/save_duration_s"] == pytest.approx(total_s, abs=1e-6)
    assert row["checkpoint/save_size_bytes"] == total_bytes


def test_structured_logs(tmp_path: Path, observed: Any, caplog: pytest.LogCaptureFixture) -> None:
    observed(LoggingExporter())
    with caplog.at_level(logging.INFO, "bytecheckpoint.calls"):
        report = save(tmp_path / "step_1")
        fail_to_save(tmp_path / "step_1")
        assert flush()
    done, failed = [each for each in caplog.records if each.name == "bytecheckpoint.calls"]
    values: dict[str, Any] = done.checkpoint  # type: ignore[attr-defined]
    assert (done.levelno, done.getMessage()) == (logging.INFO, report.summary())
    assert (values["kind"], values["step"], values["report"]["total_bytes"]) == ("save", 1, report.total_bytes)
    assert "timelines" not in values
    assert failed.levelno == logging.ERROR
    assert failed.checkpoint["error_type"] == "CheckpointExistsError"  # type: ignore[attr-defined]


class Failures:
    def __init__(self) -> None:
        self.failures: list[CallFailure] = []

    def export(self, report: Any, record: Any) -> None:
        pass

    def export_failure(self, failure: CallFailure) -> None:
        self.failures.append(failure)


def test_failures_of_plain_dcp_are_known(tmp_path: Path, observed: Any) -> None:
    heard = observed(Failures())
    save(tmp_path / "step_1")

    def fails(call: Any) -> CallFailure:
        before = len(heard.failures)
        with pytest.raises(dcp.api.CheckpointException):
            call()
        assert flush()
        assert len(heard.failures) == before + 1, "each failure is told once"
        return heard.failures[-1]

    def read_only(writer: BcpWriter) -> None:
        dcp.save(dict(STATE), storage_writer=writer, no_dist=True)

    failure = fails(lambda: read_only(BcpWriter(tmp_path / "step_1", overwrite=False)))
    assert (failure.kind, failure.error_type) == ("save", "CheckpointExistsError")
    assert failure.path == str(tmp_path / "step_1")

    class Failing(bytecheckpoint.BcpSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise OSError("no such device")

    failure = fails(
        lambda: dcp.save(dict(STATE), storage_writer=BcpWriter(tmp_path / "other"), planner=Failing(), no_dist=True)
    )
    assert failure.error_type == "OSError"
    assert "no such device" in failure.message
    assert 0 <= failure.total_s < 3600
    failure = fails(lambda: dcp.load(dict(STATE), storage_reader=BcpReader(tmp_path / "none"), no_dist=True))
    assert (failure.kind, failure.error_type) == ("load", CheckpointNotFoundError.__name__)
    assert [failure.rank for failure in heard.failures] == [0, 0, 0]
