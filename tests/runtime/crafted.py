"""Files as a stranger may have made them."""

import json
import struct
from pathlib import Path


def tensor_file(header, data=bytes(16), *, length=None):
    """A safetensors file of any header, its length told or another."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def facts(dtype="F32", shape=(4,), offsets=(0, 16)):
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


class Trap:
    """Whoever unpickles this leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))
