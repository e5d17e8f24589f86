"""Sign requests that a proxy forwards to AWS, with the credentials that boto3 finds."""

from __future__ import annotations

from collections.abc import Mapping

import boto3
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest

#: Headers of the first signature, which the client made with other credentials for another host.
_SIGNED_BEFORE = {"authorization", "host", "x-amz-date", "x-amz-security-token"}


class Signer:
    """Signs with Signature Version 4 for SQS, with credentials and region of boto3's session."""

    def __init__(self) -> None:
        session = boto3.Session()
        self._credentials = session.get_credentials()
        self._region = session.region_name

    def sign(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> dict[str, str]:
        """Return the headers of the request with a new signature."""
        kept = {k: v for k, v in headers.items() if k.lower() not in _SIGNED_BEFORE}
        request = AWSRequest(method=method, url=url, data=body, headers=kept)
        assert self._credentials is not None
        # Read the credentials for each request, because boto3 renews those of a role.
        credentials = self._credentials.get_frozen_credentials()
        SigV4Auth(credentials, "sqs", self._region).add_auth(request)
        return dict(request.headers.items())
