"""Plain values and tensors as bytes, without pickle.

Used for what `train` returns, for the small global state that travels to a joiner, and for the
JSON part of a checkpoint. Understood: None, bool, int, float, str, bytes, list, tuple, dict with
plain keys, NumPy scalars and arrays, torch tensors (moved to the CPU). Anything else is refused
with the path of the offending entry; nothing is guessed.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import google_crc32c

_TENSOR = "__tensor__"
_TUPLE = "__tuple__"
_BYTES = "__bytes__"
_ITEMS = "__items__"
_MARKS = frozenset({_TENSOR, _TUPLE, _BYTES, _ITEMS})


class NotPlain(ValueError):
    """A value that is neither plain nor a tensor; `path` names the entry."""

    def __init__(self, path: str, value: object) -> None:
        self.path = path
        super().__init__(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, "
            "which cannot be stored; use plain values and tensors"
        )


def to_plain(value: object, path: str = "value") -> Any:
    """Return `value` as JSON-able plain data; raises NotPlain."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [to_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset)):
        if isinstance(value, (set, frozenset)):
            raise NotPlain(path, value)
        return {_TUPLE: [to_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return _dict_to_plain(value, path)
    return _array_to_plain(value, path)


def check_plain(value: object, path: str = "value") -> None:
    """Raise NotPlain if `to_plain` would; copies nothing."""
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            check_plain(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, (str, int, float, bool, tuple)):
                raise NotPlain(f"{path} key {key!r}", key)
            check_plain(item, f"{path}[{key!r}]")
    elif value is not None and not isinstance(value, (bool, int, float, str, bytes)):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return
        if type(value).__module__.split(".")[0] == "numpy":
            array: Any = value
            _array_to_plain(array[:0] if getattr(array, "ndim", 0) else array, path)
            return
        raise NotPlain(path, value)


def from_plain(plain: Any) -> Any:
    """Undo `to_plain`; tensors come back as torch tensors when torch is loaded, else NumPy."""
    if isinstance(plain, list):
        return [from_plain(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        (mark,) = plain
        body = plain[mark]
        if mark == _BYTES:
            return base64.b64decode(body)
        if mark == _TUPLE:
            return tuple(from_plain(item) for item in body)
        if mark == _ITEMS:
            return {_key_from_plain(k): from_plain(v) for k, v in body}
        if mark == _TENSOR:
            return _array_from_plain(body)
    return {k: from_plain(v) for k, v in plain.items()}


def checksum(value: object, path: str = "value") -> int:
    """Return the CRC32C of a value that `to_plain` accepts; tensors are not copied as text.

    Raises NotPlain.
    """
    return _checksum(0, value, path)


def _checksum(crc: int, value: object, path: str) -> int:
    if isinstance(value, dict):
        for key in sorted(value, key=repr):  # the order of insertion means nothing
            crc = _checksum(crc, key, f"{path} key {key!r}")
            crc = _checksum(crc, value[key], f"{path}[{key!r}]")
        return _extend(crc, b"}")
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            crc = _checksum(crc, item, f"{path}[{i}]")
        return _extend(crc, b"]")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        host = value.detach().to("cpu").contiguous()
        crc = _extend(crc, f"{host.dtype}{tuple(host.shape)}".encode())
        return _extend(crc, host.reshape(-1).view(torch.uint8).numpy()) if host.numel() else crc
    return _extend(crc, json.dumps(to_plain(value, path)).encode())


def _extend(crc: int, data: Any) -> int:
    return int(google_crc32c.extend(crc, data))


def _dict_to_plain(value: dict[Any, Any], path: str) -> Any:
    if all(isinstance(k, str) for k in value) and not (_MARKS & value.keys()):
        return {k: to_plain(v, f"{path}[{k!r}]") for k, v in value.items()}
    items = []
    for k, v in value.items():
        if not isinstance(k, (str, int, float, bool, tuple)):
            raise NotPlain(f"{path} key {k!r}", k)
        items.append([to_plain(k, f"{path} key {k!r}"), to_plain(v, f"{path}[{k!r}]")])
    return {_ITEMS: items}


def _key_from_plain(plain: Any) -> Any:
    return from_plain(plain)


def _array_to_plain(value: Any, path: str) -> Any:
    kind = type(value).__module__.split(".")[0]
    if kind == "numpy":
        if value.shape == () and hasattr(value, "item"):
            return to_plain(value.item(), path)
        if value.dtype.hasobject:
            raise NotPlain(path, value)
        text = base64.b64encode(value.tobytes()).decode()
        return {_TENSOR: ["numpy", str(value.dtype), list(value.shape), text]}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        host = value.detach().to("cpu").contiguous()
        data = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
        dtype = str(host.dtype).removeprefix("torch.")
        return {_TENSOR: ["torch", dtype, list(host.shape), base64.b64encode(data).decode()]}
    raise NotPlain(path, value)


def _array_from_plain(body: list[Any]) -> Any:
    kind, dtype, shape, data = body
    raw = base64.b64decode(data)
    torch = sys.modules.get("torch")
    if kind == "torch" and torch is None:
        return {"dtype": dtype, "shape": tuple(shape), "data": raw}
    if kind == "torch" and torch is not None:
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else None
        target = getattr(torch, dtype)
        return (
            torch.empty(shape, dtype=target) if flat is None else flat.view(target).reshape(shape)
        )
    import numpy as np

    return np.frombuffer(bytearray(raw), dtype=np.dtype(dtype)).reshape(shape)
