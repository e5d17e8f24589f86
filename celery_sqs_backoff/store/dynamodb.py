"""Keep records in a DynamoDB table. Each change is one conditional write.

A condition in DynamoDB cannot use a clock of the server, so the caller's clock decides when a
record ends. Each record is kept ``clock_skew_seconds`` longer than asked for. So no record, such
as the lease of a lock, ends early if the clocks differ by less than ``clock_skew_seconds``.
DynamoDB's own TTL removes expired items only within days
(https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/TTL.html). So every condition also
checks whether the record has ended.
"""

from __future__ import annotations

import math
import time
from typing import Any

from .errors import StoreRefused, StoreUnavailable

_KEY, _VALUE, _EXPIRES_AT = "key", "value", "expires_at"
_REFUSALS = {
    *("AccessDeniedException", "ResourceNotFoundException", "UnrecognizedClientException"),
    *("ValidationException", "InvalidSignatureException", "AccessDenied"),
}
_IS_OLD = "#value = :old AND #expires_at > :now"
_NAMES = {"#value": _VALUE, "#expires_at": _EXPIRES_AT}


class DynamoDBStore:
    """Records in one table with the partition key ``key`` (String), without a sort key.

    Switch on TTL for the attribute ``expires_at`` (epoch seconds). Permissions needed:
    ``dynamodb:GetItem``, ``PutItem``, ``UpdateItem``, ``DeleteItem`` on the table.

    Arguments:
        table: name of the table.
        region, endpoint_url: as for boto3; ``None`` = boto3's default.
        clock_skew_seconds: seconds by which the workers' clocks may differ, from 0 up. Default 5.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        table: str,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        clock_skew_seconds: float | str = 5.0,
    ) -> None:
        import boto3
        from botocore.config import Config

        self._table, self._skew = table, float(clock_skew_seconds)
        if not table or not 0 <= self._skew < math.inf:
            raise ValueError("expected a table's name, and clock_skew_seconds of 0 or more")
        config = Config(connect_timeout=5, read_timeout=5, retries={"total_max_attempts": 3})
        # Use a new session, because boto3's default session is not safe for threads.
        session: Any = boto3.Session(region_name=region)
        self._client = session.client("dynamodb", endpoint_url=endpoint_url, config=config)

    def add(self, key: str, value: str, ttl: float) -> str | None:
        is_done, there = self._ask(
            "put_item",
            Item={_KEY: {"S": key}, _VALUE: {"S": value}, _EXPIRES_AT: self._end(ttl)},
            ConditionExpression="attribute_not_exists(#value) OR #expires_at <= :now",
            ExpressionAttributeNames=_NAMES,
            ExpressionAttributeValues={":now": self._now()},
            ReturnValuesOnConditionCheckFailure="ALL_OLD",
        )
        return None if is_done else str(there[_VALUE]["S"])

    def get(self, key: str) -> str | None:
        _, there = self._ask("get_item", Key={_KEY: {"S": key}}, ConsistentRead=True)
        if not there or int(there[_EXPIRES_AT]["N"]) <= int(self._now()["N"]):
            return None
        return str(there[_VALUE]["S"])

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        values = {":old": {"S": old}, ":new": {"S": new}, ":now": self._now()}
        end = {} if ttl is None else {":end": self._end(ttl)}
        return self._ask(
            "update_item",
            Key={_KEY: {"S": key}},
            UpdateExpression="SET #value = :new" + (", #expires_at = :end" if end else ""),
            ConditionExpression=_IS_OLD,
            ExpressionAttributeNames=_NAMES,
            ExpressionAttributeValues=values | end,
        )[0]

    def delete(self, key: str, old: str) -> bool:
        return self._ask(
            "delete_item",
            Key={_KEY: {"S": key}},
            ConditionExpression=_IS_OLD,
            ExpressionAttributeNames=_NAMES,
            ExpressionAttributeValues={":old": {"S": old}, ":now": self._now()},
        )[0]

    def _ask(self, operation: str, **arguments: Any) -> tuple[bool, dict[str, Any]]:
        """Make a call. Return whether its condition held, and the item in the answer, if any."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = getattr(self._client, operation)(TableName=self._table, **arguments)
        except ClientError as exc:
            code = exc.response["Error"]["Code"]
            if code == "ConditionalCheckFailedException":
                return False, dict(exc.response.get("Item", {}))  # type: ignore[call-overload]
            kind = StoreRefused if code in _REFUSALS else StoreUnavailable
            raise kind(f"DynamoDB: {code}") from exc
        except (BotoCoreError, RuntimeError) as exc:
            # botocore raises a RuntimeError if expired credentials cannot be renewed.
            raise StoreUnavailable(f"DynamoDB: {type(exc).__name__}") from exc
        return True, answer.get("Item", {})

    # DynamoDB's TTL needs whole seconds. Round the present time down and the end of a record up, so
    # that no record ends early.

    def _now(self) -> dict[str, str]:
        return {"N": str(math.floor(time.time()))}

    def _end(self, ttl: float) -> dict[str, str]:
        return {"N": str(math.ceil(time.time() + ttl + self._skew))}
