"""The part of the etcd v3 protocol that is spoken here: messages and methods.

The messages stand in a table (field numbers as etcd has published them since 3.4) and become
protobuf classes when this module is imported. Code generated in advance would tie us to one major
version of protobuf, and under etcd's own package names it would collide with any other etcd client
in the same process; so the descriptors have a pool and a package of their own, and only the method
paths carry etcd's names. Enums travel as int32, which is the same on the wire.

This module opens no connection.

Source: etcd api/etcdserverpb/rpc.proto, api/mvccpb/kv.proto.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "everstep.etcd"

# One message per line: name, then fields as name:type=number. `*` marks a repeated field, `|` a
# member of the message's one union; types with a capital are messages of this table.
_MESSAGES = """
Header           cluster_id:uint64=1 member_id:uint64=2 revision:int64=3 raft_term:uint64=4
KeyValue         key:bytes=1 create_revision:int64=2 mod_revision:int64=3 version:int64=4 \
                 value:bytes=5 lease:int64=6
Event            type:int32=1 kv:KeyValue=2
RangeRequest     key:bytes=1 range_end:bytes=2 limit:int64=3 revision:int64=4 keys_only:bool=8
RangeResponse    header:Header=1 kvs:KeyValue*=2 more:bool=3 count:int64=4
PutRequest       key:bytes=1 value:bytes=2 lease:int64=3
PutResponse      header:Header=1
DeleteRequest    key:bytes=1 range_end:bytes=2
DeleteResponse   header:Header=1 deleted:int64=2
Compare          result:int32=1 target:int32=2 key:bytes=3 mod_revision:int64|=6 lease:int64|=8
RequestOp        request_range:RangeRequest|=1 request_put:PutRequest|=2 \
                 request_delete_range:DeleteRequest|=3
ResponseOp       response_range:RangeResponse|=1 response_put:PutResponse|=2 \
                 response_delete_range:DeleteResponse|=3
TxnRequest       compare:Compare*=1 success:RequestOp*=2 failure:RequestOp*=3
TxnResponse      header:Header=1 succeeded:bool=2 responses:ResponseOp*=3
WatchCreate      key:bytes=1 range_end:bytes=2 start_revision:int64=3
WatchProgress
WatchRequest     create_request:WatchCreate|=1 progress_request:WatchProgress|=3
WatchResponse    header:Header=1 watch_id:int64=2 created:bool=3 canceled:bool=4 \
                 compact_revision:int64=5 cancel_reason:string=6 events:Event*=11
GrantRequest     TTL:int64=1 ID:int64=2
GrantResponse    header:Header=1 ID:int64=2 TTL:int64=3 error:string=4
RevokeRequest    ID:int64=1
RevokeResponse   header:Header=1
BeatRequest      ID:int64=1
BeatResponse     header:Header=1 ID:int64=2 TTL:int64=3
TimeLeftRequest  ID:int64=1
TimeLeftResponse header:Header=1 ID:int64=2 TTL:int64=3 grantedTTL:int64=4
StatusRequest
StatusResponse   header:Header=1 version:string=2 leader:uint64=4 errors:string*=8
LoginRequest     name:string=1 password:string=2
LoginResponse    header:Header=1 token:string=2
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint64": _Field.TYPE_UINT64,
}


class Method(NamedTuple):
    """One remote procedure: its path, and how its messages are written and read."""

    path: str
    request: Any
    response: Any


def _field(message: Any, text: str) -> None:
    name, _, rest = text.partition(":")
    kind, _, number = rest.partition("=")
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.endswith("*"):
        field.label = _Field.LABEL_REPEATED
    elif kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="union")
        field.oneof_index = 0
    kind = kind.rstrip("*|")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def _classes(table: str) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="everstep/etcd.proto", package=PACKAGE, syntax="proto3"
    )
    for line in table.strip().splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        for text in fields:
            _field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{PACKAGE}.{message.name}")
        )
        for message in file.message_type
    }


_CLASSES = _classes(_MESSAGES)


def _method(path: str, request: str, response: str) -> Method:
    return Method(
        path=f"/etcdserverpb.{path}",
        request=_CLASSES[request].SerializeToString,
        response=_CLASSES[response].FromString,
    )


RANGE = _method("KV/Range", "RangeRequest", "RangeResponse")
PUT = _method("KV/Put", "PutRequest", "PutResponse")
DELETE = _method("KV/DeleteRange", "DeleteRequest", "DeleteResponse")
TXN = _method("KV/Txn", "TxnRequest", "TxnResponse")
WATCH = _method("Watch/Watch", "WatchRequest", "WatchResponse")
GRANT = _method("Lease/LeaseGrant", "GrantRequest", "GrantResponse")
REVOKE = _method("Lease/LeaseRevoke", "RevokeRequest", "RevokeResponse")
BEAT = _method("Lease/LeaseKeepAlive", "BeatRequest", "BeatResponse")
TIME_LEFT = _method("Lease/LeaseTimeToLive", "TimeLeftRequest", "TimeLeftResponse")
STATUS = _method("Maintenance/Status", "StatusRequest", "StatusResponse")
LOGIN = _method("Auth/Authenticate", "LoginRequest", "LoginResponse")

EVENT_DELETE = 1
_EQUAL = 0
_TARGET_MOD, _TARGET_LEASE = 2, 4


def message(name: str, /, **fields: Any) -> Any:
    """Build the message of that name; raises ValueError on a field it does not have."""
    return _CLASSES[name](**fields)


def range_request(key: bytes, **fields: Any) -> Any:
    """Read `key`, or all from it up to `range_end`."""
    return message("RangeRequest", key=key, **fields)


def put_request(key: bytes, value: bytes, lease: int = 0) -> Any:
    """Write one key; with a lease it goes when the lease goes."""
    return message("PutRequest", key=key, value=value, lease=lease)


def mod_is(key: bytes, revision: int) -> Any:
    """Hold when the key was last written at `revision`; 0 = it is absent."""
    return message("Compare", result=_EQUAL, target=_TARGET_MOD, key=key, mod_revision=revision)


def lease_is(key: bytes, lease: int) -> Any:
    """Hold when the key exists on that lease."""
    return message("Compare", result=_EQUAL, target=_TARGET_LEASE, key=key, lease=lease)


def txn_request(compare: list[Any], success: list[Any], failure: list[Any]) -> Any:
    """Do all of `success` if all of `compare` holds, else all of `failure`, at one revision."""
    return message(
        "TxnRequest",
        compare=compare,
        success=[_operation(request) for request in success],
        failure=[_operation(request) for request in failure],
    )


def prefix_end(prefix: bytes) -> bytes:
    """Return the range end that makes [prefix, end) all keys that begin with `prefix`."""
    last = prefix[-1]
    if last == 0xFF:
        raise ValueError("a prefix that ends in 0xff is not used here")
    return prefix[:-1] + bytes([last + 1])


def _operation(request: Any) -> Any:
    field = {
        "RangeRequest": "request_range",
        "PutRequest": "request_put",
        "DeleteRequest": "request_delete_range",
    }[request.DESCRIPTOR.name]
    return message("RequestOp", **{field: request})
