"""Damaged or hostile activations: a ``ValueError`` that names the array, nothing unpickled, nothing huge allocated."""

import io
import pickle
import struct
import zipfile

import numpy as np
import pytest

import gradflow
from gradflow.recorded import recording

U = np.random.default_rng(0).normal(size=(2, 3, 5))


def refused(source, message, **options):
    with pytest.raises(ValueError, match=message) as caught:
        gradflow.contraction(activations=source, **options)
    assert "\n" not in str(caught.value)


def npy(shape, payload, descr="<f8", version=(1, 0)):
    """A hand-made .npy member: its header may lie."""
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(header)) + header + payload


def archive(path, **members):
    with zipfile.ZipFile(path, "w") as out:
        for name, data in members.items():
            out.writestr(f"{name}.npy", data)
    return path


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.npz"
    np.savez(path, u=U, x=U, gain=np.ones((2, 5)), eps=1e-5, cotangent=np.arange(15.0).reshape(3, 5))
    gradflow.contraction(activations=path, probes=1)
    return path


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_truncated_at_any_point(good, tmp_path, fraction):
    data = good.read_bytes()
    cut = tmp_path / "cut.npz"
    cut.write_bytes(data[: int(fraction * len(data))])
    refused(cut, "activations: ")


def outcome(path):
    """What reading gives: the array, or the message of the refusal."""
    try:
        return recording(path).u
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_flipped_byte_anywhere_is_refused_or_harmless(tmp_path, compressed):
    path = tmp_path / "x.npz"
    (np.savez_compressed if compressed else np.savez)(path, u=U)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        read = outcome(path)
        if isinstance(read, str):
            assert read.startswith("activations: ")
            assert "\n" not in read
        else:
            np.testing.assert_array_equal(read, U)


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_objects_are_refused_and_never_unpickled(tmp_path):
    trap = tmp_path / "sprung"
    objects = np.empty(3, object)
    objects[:] = [Trap(str(trap))] * 3
    path = tmp_path / "objects.npz"
    np.savez(path, allow_pickle=True, u=objects)
    refused(path, "activations: 'u'.*pickle")
    raw = tmp_path / "raw.npz"
    raw.write_bytes(pickle.dumps(Trap(str(trap))))
    refused(raw, "activations: ")
    inside = archive(tmp_path / "inside.npz", u=pickle.dumps(Trap(str(trap))))
    refused(inside, "activations: 'u'")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Trap(str(trap)))).close()
    assert trap.exists()  # the trap does work


@pytest.mark.parametrize(
    ("shape", "payload"),
    [
        ("(2, 3, 5)", b""),
        ("(2, 3, 5)", b"\0" * 8 * 29),
        ("(2, 3, 5)", b"\0" * 8 * 31),
        ("(1000000000, 1000000000, 1000000)", b"\0" * 240),
        ("(4611686018427387904, 4, 5)", b"\0" * 240),
        ("(-2, -3, 5)", b"\0" * 240),
        ("(-2, 3, -5)", b"\0" * 240),
        ("(2.0, 3, 5)", b"\0" * 240),
        ("(True, 6, 5)", b"\0" * 240),
        ("'abc'", b"\0" * 240),
        ("None", b"\0" * 240),
        ("(0, 3, 5)", b""),
        ("(2, 3, 0)", b""),
    ],
)
def test_a_header_that_lies_about_its_size(tmp_path, shape, payload):
    refused(archive(tmp_path / "lie.npz", u=npy(shape, payload)), "activations: 'u'")


@pytest.mark.parametrize(
    "descr", ["<q9", "|O", "O", "<c16", "<U4", "|S8", "<M8[s]", "|V8", "|b1", "nonsense", "<f2222"]
)
def test_a_dtype_that_is_no_number(tmp_path, descr):
    refused(archive(tmp_path / "kind.npz", u=npy("(2, 3, 5)", b"\0" * 240, descr)), "activations: 'u'")


@pytest.mark.parametrize(
    "data", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff", b"\x93NUMPY\x07\x00" + b" " * 80, b"GIF89a" * 40]
)
def test_a_member_that_is_no_npy(tmp_path, data):
    refused(archive(tmp_path / "member.npz", u=data), "activations: 'u'")


def test_a_bomb_of_a_header_is_refused(tmp_path):
    deep = npy("(" * 400 + ")" * 400, b"")
    refused(archive(tmp_path / "deep.npz", u=deep), "activations: 'u'")


def member(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_duplicated_member(tmp_path):
    path = tmp_path / "twice.npz"
    with zipfile.ZipFile(path, "w") as out:
        for value in (U, 2 * U):
            out.writestr("u.npy", member(value))
    refused(path, "activations: ")


def test_an_encrypted_member(tmp_path):
    path = tmp_path / "locked.npz"
    np.savez(path, u=U)
    data = bytearray(path.read_bytes())
    data[data.find(b"PK\x01\x02") + 8] |= 1
    data[6] |= 1
    path.write_bytes(bytes(data))
    refused(path, "activations: ")


def test_no_file_directory_empty_and_other_formats(tmp_path):
    refused(tmp_path / "none.npz", "activations: no such file.*none.npz")
    refused(tmp_path, "activations: ")
    empty = tmp_path / "empty.npz"
    empty.touch()
    refused(empty, "activations: ")
    text = tmp_path / "text.npz"
    text.write_text("u = 1\n")
    refused(text, "activations: ")
    np.save(tmp_path / "one.npy", U)
    refused(tmp_path / "one.npy", "activations: ")
    with zipfile.ZipFile(tmp_path / "no_arrays.npz", "w"):
        pass
    refused(tmp_path / "no_arrays.npz", "activations: 'u' is missing")
    refused("", "activations: ")
    refused("nul\0byte", "activations: ")


@pytest.mark.parametrize("source", [3, 2.5, b"bytes", [1, 2], U, object()], ids=lambda s: type(s).__name__)
def test_what_is_neither_path_nor_mapping(source):
    refused(source, "activations: ")


ARRAYS = {
    "u missing": (dict(x=U), "'u' is missing"),
    "unknown array": (dict(u=U, v=U), "unknown array 'v'"),
    "u of two axes": (dict(u=U[0]), "'u' needs shape"),
    "u of four axes": (dict(u=U[None]), "'u' needs shape"),
    "u without sub-layers": (dict(u=U[:0]), "'u' needs shape"),
    "u without tokens": (dict(u=U[:, :0]), "'u' needs shape"),
    "u of width one": (dict(u=U[:, :, :1]), "'u' needs shape"),
    "u nan": (dict(u=np.where(U > 1, np.nan, U)), "'u': holds .* NaN"),
    "u infinite": (dict(u=np.where(U > 1, np.inf, U)), "'u': holds .* infinite"),
    "u complex": (dict(u=U + 0j), "'u' needs real numbers.*complex"),
    "u text": (dict(u=U.astype(str)), "'u' needs real numbers"),
    "u bools": (dict(u=U > 0), "'u' needs real numbers"),
    "u objects": (dict(u=U.astype(object)), "'u'"),
    "u ragged": (dict(u=[[[1.0, 2.0]], [[3.0]]]), "'u'"),
    "u none": (dict(u=None), "'u'"),
    "x of another shape": (dict(u=U, x=U[:1]), "'x' needs shape"),
    "x nan": (dict(u=U, x=np.full_like(U, np.nan)), "'x': holds"),
    "gain of another width": (dict(u=U, gain=np.ones(4)), "'gain' needs shape"),
    "gain of another depth": (dict(u=U, gain=np.ones((3, 5))), "'gain' needs shape"),
    "gain nan": (dict(u=U, gain=np.full(5, np.nan)), "'gain': holds"),
    "eps negative": (dict(u=U, eps=-1e-5), "'eps'"),
    "eps vector": (dict(u=U, eps=np.ones(2)), "'eps' needs shape"),
    "eps nan": (dict(u=U, eps=np.nan), "'eps'"),
    "cotangent of another shape": (dict(u=U, cotangent=np.ones(5)), "'cotangent' needs shape"),
    "cotangent nan": (dict(u=U, cotangent=np.full((3, 5), np.nan)), "'cotangent': holds"),
    "numbers as names": ({"u": U, 3: U}, "unknown array"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_disagree(case, tmp_path):
    arrays, message = ARRAYS[case]
    refused(arrays, f"^activations: {message}")
    if case not in ("u objects", "u ragged", "u none", "numbers as names"):
        np.savez(tmp_path / "bad.npz", **arrays)
        refused(tmp_path / "bad.npz", f"^activations: {message}")


OPTIONS = {
    "zero cotangent in the file": (dict(u=U, cotangent=np.zeros((3, 5))), {}, "cotangent"),
    "null cotangent in the file": (dict(u=U, cotangent=np.ones((3, 5))), {}, "cotangent.*null space"),
    "another depth": (dict(u=U), dict(depth=7), "depth: .*2"),
    "another width": (dict(u=U), dict(d=6), "d: .*5"),
    "a scheme that hides the trunk": (dict(u=U), dict(scheme="pre-ln"), "scheme"),
    "an unknown norm": (dict(u=U), dict(norm="rmss"), "norm"),
    "two features under layernorm": (dict(u=U[:, :, :2]), {}, "d: .*3"),
    "zero probes": (dict(u=U), dict(probes=0), "probes"),
    "a bad key": (dict(u=U), dict(key=-1), "key"),
    "a bad c": (dict(u=U), dict(c=2), "c: "),
    "a bad dtype": (dict(u=U), dict(dtype="float16"), "dtype"),
    "an aligned cotangent": (dict(u=U), dict(cotangent="aligned"), "cotangent"),
    "tokens that are not the file's": (dict(u=U), dict(tokens=7), "tokens"),
    "a cotangent of one's own with probes": (
        dict(u=U),
        dict(cotangent=np.arange(15.0).reshape(3, 5), probes=4),
        "probes",
    ),
    "a final norm": (dict(u=U), dict(final_norm=True), "final_norm"),
    "the alignment reading": (dict(u=U), dict(reading="alignment"), "reading"),
    "a branch": (dict(u=U), dict(branch="mlp:relu"), "branch"),
    "seeds": (dict(u=U), dict(seeds=0), "seeds"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_recorded_activations_cannot_have(case):
    arrays, options, message = OPTIONS[case]
    refused(arrays, f"^(activations: )?'?{message}", **options)
