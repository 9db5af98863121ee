"""What a failure of gRPC or etcd means for the one who made the call.

Where the same condition comes under different codes in different versions, the text decides.

Source: etcd api/v3rpc/rpctypes (codes and texts of its errors).
"""

from __future__ import annotations

from typing import Any

import grpc

from elastic.membership.coord import CoordError, CoordMisconfigured, CoordRetryable, SessionLost

_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,  # a stream that was reset in the middle
        grpc.StatusCode.UNKNOWN,  # a server in the middle of stopping
        grpc.StatusCode.FAILED_PRECONDITION,  # "not leader"
    }
)
_NO_SPACE_HINT = (
    "make room with `etcdctl compact`, `etcdctl defrag` and `etcdctl alarm disarm`; "
    "running steps are not affected"
)


def translate(code: Any, details: str, endpoint: str) -> CoordError:
    """Say what a failure of gRPC or etcd means for the caller."""
    what = details.removeprefix("etcdserver: ")
    where = f"etcd at {endpoint}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "space exceeded" in details:
        message_ = f"{where} takes no writes because its database is full"
        return CoordRetryable(message_, kind="no-space", hint=_NO_SPACE_HINT, after_s=1.0)
    if "larger than max" in details or "request is too large" in details:
        return CoordMisconfigured(f"{where} refused a record: {what}", kind="too-large")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CoordRetryable(f"{where} is overloaded: {what}", after_s=0.5)
    if code is grpc.StatusCode.UNAVAILABLE and "no leader" in details:
        return CoordRetryable(f"{where} has no leader")
    if "authentication is not enabled" in details:
        return CoordMisconfigured(f"{where} has no users", kind="auth-off")
    if refuses_login(details) or code in {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }:
        return no_permission(what, endpoint)
    if code in _AGAIN:
        return CoordRetryable(f"{where} did not answer: {what or code.name}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return wrong_version(endpoint, f"it does not know a call of the v3 API ({what})")
    if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
        return SessionLost(f"{where} does not know our lease any more")
    if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
        return CoordRetryable(f"{where} has compacted this revision", kind="compacted")
    if code is grpc.StatusCode.DATA_LOSS:
        return CoordMisconfigured(f"{where} reports damaged data: {what}", kind="corrupt")
    return CoordMisconfigured(f"{where} refused a call: {what or code.name}", kind="refused")


def refuses_login(details: str) -> bool:
    """Return whether a text of etcd's speaks of who we are, under whatever code it came."""
    return any(
        text in details
        for text in (
            "invalid auth token",
            "user name is empty",
            "permission denied",
            "revision of auth store is old",
            "authentication failed",
        )
    )


def no_permission(what: str, endpoint: str) -> CoordMisconfigured:
    """Return the error for a user that etcd does not let do this."""
    hint = "give a user that may read and write the prefix /everstep/"
    if "user name is empty" in what:
        hint = "its authentication is on: give a user and a password"
    elif "authentication failed" in what:
        hint = "check the user and the password"
    return CoordMisconfigured(
        f"etcd at {endpoint} does not permit this: {what}", kind="no-permission", hint=hint
    )


def wrong_version(endpoint: str, what: str) -> CoordMisconfigured:
    """Return the error for a server that is no etcd we can use."""
    return CoordMisconfigured(
        f"the server at {endpoint} is no etcd that can be used: {what}",
        kind="wrong-version",
        hint="use etcd 3.4 or newer",
    )
