import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from prefixcache.errors import ConfigError
from prefixcache.sim import Trace, TraceOptions, read_trace


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def request(input_length: int, ids: list[int], *, at_ms: int = 0) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": input_length, "output_length": 5, "hash_ids": ids}


def turn(t: float, *, keep: int, runs: list[list[int]], agent: int = 0) -> dict[str, Any]:
    return {"t": t, "in": 640, "out": 7, "agent": agent, "keep": keep, "runs": runs}


def session(name: str, *turns: dict[str, Any], block_size: int = 64) -> dict[str, Any]:
    return {"id": name, "block_size": block_size, "requests": list(turns)}


def keys(trace: Trace) -> list[list[int]]:
    return [list(request.block_keys) for request in trace.requests]


def test_the_block_size_is_found_where_the_last_block_is_partial(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", request(1100, [0, 1, 2]), request(513, [0, 3]))
    assert read_trace(path).block_size == 512


def test_the_block_size_is_found_where_only_full_blocks_have_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", request(47, [0, 1]), request(90, [0, 1, 2, 3, 4]))
    assert read_trace(path).block_size == 16


def test_an_ambiguous_block_size_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", request(3, [0]))
    with pytest.raises(ConfigError, match=r"4 and 8 and 16 .* give the block size"):
        read_trace(path)
    assert read_trace(path, TraceOptions(block_size=8)).block_size == 8


def test_requests_keep_lengths_and_count_their_time_from_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", request(600, [0, 1], at_ms=4500), request(1500, [0, 1, 2], at_ms=2000))
    first, second = read_trace(path, TraceOptions(block_size=512)).requests
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 1500, 5)
    assert (second.arrival_s, second.input_tokens) == (2.5, 600)


def test_one_id_under_two_prefixes_is_two_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", request(1024, [1, 2]), request(1024, [3, 2]), request(1536, [1, 2, 4]))
    first, second, third = keys(read_trace(path, TraceOptions(block_size=512)))
    assert first == third[:2]
    assert not set(first) & set(second)


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_packed_files_are_read(tmp_path: Path, suffix: str) -> None:
    text = json.dumps(request(1100, [0, 1, 2])).encode()
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(lzma.compress(text) if suffix == ".xz" else gzip.compress(text))
    assert len(read_trace(path).requests) == 1


def test_a_session_request_keeps_a_part_of_the_one_before(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", session("s", turn(0, keep=0, runs=[[5, 3]]), turn(2, keep=2, runs=[[9, 2]])))
    first, second = keys(read_trace(path))
    assert (len(first), len(second)) == (3, 4)
    assert second[:2] == first[:2]
    assert second[2] != first[2]


def test_sub_agents_have_histories_of_their_own(tmp_path: Path) -> None:
    turns = [
        turn(0, keep=0, runs=[[1, 2]]),
        turn(1, keep=0, runs=[[7, 2]], agent=1),
        turn(2, keep=2, runs=[[3, 1]]),
        turn(3, keep=1, runs=[[8, 1]], agent=1),
    ]
    main, sub, main_again, sub_again = keys(read_trace(write(tmp_path / "t.jsonl", session("s", *turns))))
    assert main_again[:2] == main
    assert sub_again == sub


def test_sessions_start_in_shuffled_order_at_an_interval(tmp_path: Path) -> None:
    sessions = [session(str(number), turn(3, keep=0, runs=[[number, 1]])) for number in range(20)]
    path = write(tmp_path / "t.jsonl", *sessions)
    trace = read_trace(path, TraceOptions(session_interval_s=60, shuffle_seed=0))
    order = [request.session for request in trace.requests]
    assert [request.arrival_s for request in trace.requests] == [60.0 * place + 3 for place in range(20)]
    assert sorted(order, key=int) != order
    assert order != [request.session for request in read_trace(path, TraceOptions(shuffle_seed=1)).requests]


def test_requests_of_overlapping_sessions_are_merged_by_time(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        session("a", turn(0, keep=0, runs=[[1, 1]]), turn(90, keep=1, runs=[])),
        session("b", turn(0, keep=0, runs=[[2, 1]])),
    )
    trace = read_trace(path)
    assert [request.arrival_s for request in trace.requests] == sorted(request.arrival_s for request in trace.requests)
    assert len({request.session for request in trace.requests[:2]}) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no line"),
        (["{\n"], "line 1 is not JSON"),
        (["[1]\n"], "line 1 is no JSON object"),
        ([request(1024, [0, 1]), {"timestamp": 0}], "request 2 lacks"),
        ([request(1024, [0, 1]) | {"input_length": -1}], "request 1 lacks"),
        ([request(1024, [0, 1]) | {"hash_ids": ["a"]}], "request 1 lacks"),
        ([request(100, [0] * 90)], "no power of two"),
        ([session("s", {"t": 0})], "session 's' has a request that cannot be read"),
        ([session("s"), session("r", block_size=32)], "one and the same block_size"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, lines: list[Any], message: str) -> None:
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_an_absent_or_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    damaged = tmp_path / "t.jsonl.xz"
    damaged.write_bytes(b"no archive")
    for path in (tmp_path / "absent", damaged):
        with pytest.raises(ConfigError, match=f"cannot read the trace {path}"):
            read_trace(path)
