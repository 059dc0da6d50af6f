import dataclasses
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from google.protobuf.descriptor import Descriptor

import prefixcache
import prefixcache.client
import prefixcache.client.diagnosis as client_diagnosis
import prefixcache.client.statistics as client_statistics
import prefixcache.client.types as client_types
import prefixcache.errors
from prefixcache import AsyncClient, AsyncGenerationStream, Client, GenerateOptions, GenerationStream
from prefixcache.client.options import GenerateSettings
from prefixcache.pb.v1 import admin_pb2, cache_pb2, worker_pb2

ROOT = Path(prefixcache.__file__).parents[1]


def public_methods(kind: type) -> dict[str, Any]:
    return {name: member for name, member in vars(kind).items() if inspect.isfunction(member) and name[0] != "_"}


def test_every_method_of_the_async_client_has_a_synchronous_namesake_with_its_parameters() -> None:
    ours, theirs = public_methods(Client), public_methods(AsyncClient)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert inspect.signature(ours[name]).parameters == inspect.signature(theirs[name]).parameters, name
    assert inspect.signature(Client).parameters == inspect.signature(AsyncClient).parameters


def test_the_streams_have_the_same_methods() -> None:
    assert {"collect", "close"} == public_methods(GenerationStream).keys()
    assert {"collect", "aclose"} == public_methods(AsyncGenerationStream).keys()


def test_the_options_are_written_down_once_for_callers_and_once_for_defaults() -> None:
    assert get_type_hints(GenerateOptions) == get_type_hints(GenerateSettings)
    assert list(get_type_hints(GenerateOptions)) == [field.name for field in dataclasses.fields(GenerateSettings)]


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        Client().stream("x", max_tokens=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (client_types.Usage, worker_pb2.Usage),
        (client_types.Timings, worker_pb2.Timings),
        (client_types.Started, worker_pb2.Started),
        (client_types.ModelInfo, worker_pb2.GetModelInfoResponse),
        (client_types.Lookup, cache_pb2.LookupResponse),
        (client_statistics.WorkerStats, admin_pb2.GetStatsResponse),
        (client_statistics.RequestCounters, admin_pb2.RequestStats),
        (client_statistics.TokenCounters, admin_pb2.TokenStats),
        (client_statistics.CacheCounters, admin_pb2.CacheStats),
        (client_statistics.EngineCounters, admin_pb2.EngineStats),
        (client_statistics.LatencyCounters, admin_pb2.LatencyStats),
        (client_statistics.Percentiles, admin_pb2.Percentiles),
        (client_statistics.TierCounters, admin_pb2.TierStats),
        (client_statistics.StoredNamespace, admin_pb2.StoredNamespace),
        (client_types.Evicted, admin_pb2.EvictResponse),
        (client_types.Cleared, admin_pb2.ClearResponse),
        (client_diagnosis.Diagnosis, admin_pb2.DiagnoseResponse),
        (client_diagnosis.QualificationCheck, admin_pb2.QualificationCheck),
        (client_diagnosis.Measurement, admin_pb2.Measurement),
    ],
    ids=lambda value: value.__name__,
)
def test_a_result_has_every_field_of_its_message(kind: Any, message: Any) -> None:
    descriptor: Descriptor = message.DESCRIPTOR
    assert {field.name for field in dataclasses.fields(kind)} == set(descriptor.fields_by_name)


def test_every_finish_reason_has_a_name() -> None:
    from prefixcache.client.messages import _REASONS

    assert {*_REASONS, worker_pb2.FINISH_REASON_UNSPECIFIED} == set(worker_pb2.FinishReason.values())


def test_every_export_is_listed_and_can_be_loaded() -> None:
    for name in prefixcache.__all__:
        assert getattr(prefixcache, name) is not None
        assert name in dir(prefixcache)


def test_everything_the_client_and_the_errors_define_is_exported() -> None:
    errors = {name for name, value in vars(prefixcache.errors).items() if isinstance(value, type)}
    assert {*prefixcache.client.__all__, *errors, "__version__"} == set(prefixcache.__all__)


def test_every_result_type_is_exported() -> None:
    defined = {
        name for name, value in vars(client_types).items() if getattr(value, "__module__", "") == client_types.__name__
    }
    assert defined <= set(prefixcache.client.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        prefixcache.nothing_like_this  # noqa: B018


def test_the_version_is_the_distributions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert prefixcache.__version__ == project["version"]


@pytest.mark.parametrize(
    "code",
    [
        "import prefixcache",
        "from prefixcache.cli.app import app; app(['--help'], standalone_mode=False)",
        "from prefixcache.cli.app import app; app(['generate', '--help'], standalone_mode=False)",
        "from prefixcache.cli.app import app; app(['demo', '--help'], standalone_mode=False)",
    ],
)
def test_importing_and_asking_for_help_load_nothing_heavy(code: str) -> None:
    heavy = ("torch", "transformers", "redis", "lmdb", "grpc", "google.protobuf", "model_worker")
    check = f"{code}\nimport sys\nprint('LOADED', [name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "LOADED []"
