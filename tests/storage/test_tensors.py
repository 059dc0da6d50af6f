import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.errors import InvalidRequest
from prefixcache.storage.tensors import ALIGNMENT, DTYPE_BYTES, MAX_BODY_BYTES, TensorSpec, body_bytes, lay_out

NAMES = st.text("kvq.01", min_size=1, max_size=9)
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@given(st.lists(st.tuples(NAMES, st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), max_size=9))
def test_laid_out_tensors_are_aligned_ordered_and_disjoint(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    end = 0
    for spec in lay_out(tensors):
        assert spec.offset % ALIGNMENT == 0
        assert end <= spec.offset < end + ALIGNMENT
        end = spec.end
    assert body_bytes(lay_out(tensors)) == end


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 48), ("float32", 96), ("int8", 24), ("float64", 192)])
def test_bytes_follow_from_shape_and_dtype(dtype: str, num_bytes: int) -> None:
    assert TensorSpec(name="k", dtype=dtype, shape=(2, 4, 3), offset=64).num_bytes == num_bytes


@pytest.mark.parametrize(
    ("dtype", "shape", "offset"),
    [
        ("half", (1,), 0),
        ("int8", (), 0),
        ("int8", (0,), 0),
        ("int8", (1,) * 9, 0),
        ("int8", (1,), 63),
        ("int8", (1,), -64),
        ("int8", (MAX_BODY_BYTES,), 64),
        ("int8", (2**29,) * 8, 0),
    ],
)
def test_a_tensor_out_of_bounds_cannot_be_made(dtype: str, shape: tuple[int, ...], offset: int) -> None:
    with pytest.raises(InvalidRequest, match="tensor 'k'"):
        TensorSpec(name="k", dtype=dtype, shape=shape, offset=offset)


def test_a_body_may_be_as_large_as_its_bound_and_no_larger() -> None:
    half = ("int8", (MAX_BODY_BYTES // 2,))
    assert body_bytes(lay_out([("k", *half), ("v", *half)])) == MAX_BODY_BYTES
    with pytest.raises(InvalidRequest, match="smaller block size"):
        lay_out([("k", *half), ("v", *half), ("w", "int8", (1,))])
