"""One bucket, reached through s3fs on an event loop of our own.

s3fs signs, finds credentials and endpoints by its usual rules (AWS_* variables, ~/.aws, fsspec's
configuration). Everything about time is ours: each request has a deadline, each attempt a shorter
one, and between attempts lies a full-jitter pause that doubles. The retries inside botocore and
s3fs are off, because they would multiply.

Errors are sorted by what can be done about them, from the code that the server sent and not from
the exception's type: the same code comes as several types. Expired credentials are looked up afresh
and the request is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from ckpt.errors import (
    CheckpointError,
    Conflict,
    Corrupt,
    Fatal,
    Misconfigured,
    NotFound,
    Retryable,
)

__all__ = ["S3"]

T = TypeVar("T")

_ABSENT = {"NoSuchKey", "NoSuchVersion", "NoSuchUpload", "404"}
_DENIED = {"AccessDenied", "AccountProblem", "AllAccessDisabled", "InvalidObjectState", "403"}
_REFUSED = {
    "AuthorizationHeaderMalformed",
    "InvalidAccessKeyId",
    "InvalidSecurity",
    "SignatureDoesNotMatch",
}
_EXPIRED = {"ExpiredToken", "InvalidToken", "RequestExpired", "TokenRefreshRequired"}
_REDIRECTED = {"301", "307", "IllegalLocationConstraintException", "PermanentRedirect", "Redirect"}
_BUSY = {
    "408",
    "409",
    "429",
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}

PAUSE_S = 0.1
MAX_PAUSE_S = 8.0
ATTEMPT_TIMEOUT_S = 60.0


class S3:
    """Calls to one bucket, from any thread or as coroutines on `loop`."""

    def __init__(self, bucket: str, *, options: Mapping[str, Any], shown: str) -> None:
        self.bucket = bucket
        self.shown = shown
        """How errors name the place."""
        self.loop = asyncio.new_event_loop()
        self._options = dict(options)
        self._fs: Any = None
        self._fs_lock = asyncio.Lock()
        self._thread = threading.Thread(target=self._run_loop, name="ckpt-s3", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on our loop, from another thread."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close connections and end the loop. Idempotent."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)

    async def call(self, method: str, *, deadline_s: float = 60.0, **arguments: Any) -> Any:
        """The answer to one request; a body is read whole and stands under "Body" as bytes.

        Raises what `ckpt.errors` has; Retryable only when the deadline has passed.
        """
        end_s = self.loop.time() + deadline_s
        pause_s = PAUSE_S
        known: Retryable | None = None
        while True:
            try:
                left_s = end_s - self.loop.time()
                async with asyncio.timeout(max(0.1, min(ATTEMPT_TIMEOUT_S, left_s))):
                    fs = await self._connected()
                    answer = await fs._call_s3(method, Bucket=self.bucket, **arguments)  # noqa: SLF001
                    if "Body" in answer:
                        async with answer["Body"] as body:
                            answer["Body"] = await body.read()
                    return answer
            except Exception as error:  # noqa: BLE001 - sorted right here
                problem = self._sort(error, method, arguments.get("Key", ""))
                wait_s = random.uniform(0.0, pause_s)  # noqa: S311 - jitter
                if isinstance(problem, Retryable) and problem.kind != "timeout":
                    known = problem
                if not isinstance(problem, Retryable):
                    raise problem from error
                if self.loop.time() + wait_s >= end_s:
                    raise known or problem from error  # the deadline itself explains nothing
                if problem.kind == "credentials-expired":
                    await self._forget_session()
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def pages(self, method: str, **arguments: Any) -> AsyncIterator[Any]:
        """All answers of a listing."""
        token_in, token_out = (
            (("ContinuationToken",), ("NextContinuationToken",))
            if method == "list_objects_v2"
            else (("KeyMarker", "UploadIdMarker"), ("NextKeyMarker", "NextUploadIdMarker"))
        )
        more: dict[str, Any] = {}
        while True:
            answer = await self.call(method, **arguments, **more)
            yield answer
            if not answer.get("IsTruncated"):
                return
            more = {
                name: answer[source]
                for name, source in zip(token_in, token_out, strict=True)
                if answer.get(source)
            }
            if not more:
                raise Fatal(f"{self.shown} cuts its listings short", kind="listing")

    async def _connected(self) -> Any:
        async with self._fs_lock:
            if self._fs is None:
                self._fs = _file_system(self._options)
                await self._fs.set_session()
            return self._fs

    async def _forget_session(self) -> None:
        with contextlib.suppress(Exception):
            await self._fs.set_session(refresh=True)

    async def _close(self) -> None:
        tasks = [t for t in asyncio.all_tasks(self.loop) if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._fs is not None:
            await self._fs._s3.close()  # noqa: SLF001 - s3fs has no public way in its own loop

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _sort(self, error: BaseException, method: str, key: str) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        code, status = _code(error)
        place = f"{self.shown}/{key}" if key else self.shown
        if code:
            return self._sort_code(code, status, place, method, error)
        name = _root(error).__class__.__name__
        if name in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
            return Misconfigured(
                f"no credentials for {self.shown} were found ({_root(error)})",
                kind="credentials-missing",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile",
            )
        if name in ("ParamValidationError", "InvalidEndpointConfigurationError", "ValueError"):
            return Misconfigured(f"{place} is refused before it is sent: {error}", kind="url")
        if isinstance(error, TimeoutError):
            return Retryable(f"{place} did not answer in time", kind="timeout")
        return Retryable(
            f"{place} cannot be reached: {_without_query(error)}",
            kind="unreachable",
            hint="check the network and AWS_ENDPOINT_URL",
        )

    def _sort_code(
        self, code: str, status: int, place: str, method: str, error: BaseException
    ) -> CheckpointError:
        said = f"{code}: {error}" if str(error) != code else code
        if code == "NoSuchBucket" or (code == "404" and method == "head_bucket"):
            return Misconfigured(
                f"the bucket {self.bucket!r} does not exist",
                kind="bucket-missing",
                hint="create it, or correct the URL",
            )
        if code in _ABSENT:
            return NotFound(f"{place} does not exist", kind="not-found")
        if code in _DENIED:
            return Misconfigured(
                f"{place} refuses {method} ({said})",
                kind="access-denied",
                hint="check the keys and their rights to this bucket",
            )
        if code in _REFUSED:
            return Misconfigured(
                f"{self.shown} refuses the credentials ({said})",
                kind="credentials-refused",
                hint="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the region",
            )
        if code in _EXPIRED:
            return Retryable(
                f"the credentials for {self.shown} have expired", kind="credentials-expired"
            )
        if code in _REDIRECTED:
            return Misconfigured(
                f"the bucket {self.bucket!r} is in another region ({said})",
                kind="region",
                hint="set AWS_DEFAULT_REGION",
            )
        if code == "RequestTimeTooSkewed":
            return Misconfigured(f"the clock of this host is wrong ({said})", kind="clock")
        if code in ("PreconditionFailed", "412"):
            return Conflict(f"{place} is there already", kind="exists")
        if code in ("InvalidRange", "416"):
            return Corrupt(f"{place} is shorter than it should be", kind="truncated")
        if code in _BUSY or (status >= 500 and code != "NotImplemented"):
            return Retryable(f"{place} is busy ({said})", kind="busy")
        return Fatal(f"{place} refuses {method} ({said})", kind=f"s3-{code}")


def _file_system(options: Mapping[str, Any]) -> Any:
    import fsspec.config
    import s3fs

    configured = fsspec.config.conf.get("s3", {})
    config = {
        "connect_timeout": 5,
        "read_timeout": ATTEMPT_TIMEOUT_S,
        "max_pool_connections": 32,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        # Botocore's own CRC on top of the signature's SHA-256 costs a fifth of the speed and is not
        # understood by all servers; our CRC32C travels in the pack and is checked when it is read.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    config |= configured.get("config_kwargs", {})
    config |= options.get("config_kwargs", {})
    fs = s3fs.S3FileSystem(
        **{
            **options,
            "config_kwargs": config,
            "asynchronous": True,
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
    )
    fs.retries = 1
    return fs


def _without_query(error: BaseException) -> str:
    return re.sub(r"\?[^\s\"']*", "", str(error))


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _code(error: BaseException) -> tuple[str, int]:
    """The server's code and HTTP status; empty if it did not answer."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict) and "Error" in response:
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return str(response["Error"].get("Code") or status), status
        seen = seen.__cause__
    return "", 0
